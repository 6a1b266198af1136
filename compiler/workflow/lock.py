"""One build at a time per model folder, by a lock that dies with its process.

Snakemake's own lock is a file that stays when a run is killed, so that the next run refuses to start; the default
workflow profile turns it off and the Snakefile takes this one.
"""

import fcntl
from pathlib import Path
from typing import IO

from schemas.errors import ColdpressError

LOCK_FILE = ".lock"


def hold(folder: Path) -> IO[str]:
    """Locks `folder` for as long as the returned file stays open; the system releases it however the process ends.

    Raises:
        ColdpressError: if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK_FILE).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ColdpressError(f"another build runs in {folder}; wait for it or name another build_dir") from error
    return file
