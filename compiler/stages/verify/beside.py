"""Measures what a process of the runtime takes beside its DRAM budget, in a process that has loaded nothing else."""

import os
import subprocess
import sys

from coldpress.runtime.cli import process_memory
from coldpress.schemas.errors import ColdpressError


def process_bytes(folder: str) -> int:
    """Returns the resident memory of a process that has opened the artifact in `folder`.

    Raises:
        ColdpressError: if that process fails.
    """
    # one thread: the stacks of more are no memory of the runtime
    own = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", process_memory.__name__, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    if done.returncode or not done.stdout.strip().isdigit():
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ColdpressError(
            f"the process that measures its own memory ended with code {done.returncode} ({last}), expected a number "
            "of bytes; run verify again"
        )
    return int(done.stdout)
