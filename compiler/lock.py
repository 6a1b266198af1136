"""One build at a time per folder, by locks that die with their processes.

A build holds `.lock` alone, from before snakemake looks at any file until it ends. Its jobs share `.jobs`: after a
build is killed they run on and write, here or on the nodes of a cluster, and no build begins before the last has ended;
one that still waited in the cluster's queue refuses to run. What the files say tells who holds them; whether they are
held, only the system says, so a file that is left means nothing. Snakemake's own lock is such a file: the default
workflow profile turns it off.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from coldpress.schemas.errors import ColdpressError

LOCK_FILE, JOBS_FILE = ".lock", ".jobs"
BUILD_VARIABLE = "COLDPRESS_BUILD"
"""Environment variable by which jobs know the build that they are of: what its lock file says."""
TELLING_S = 1.0
"""How long a holder may take to write down who it is."""


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Holds the build in `folder` within the block.

    Raises:
        ColdpressError: if another process holds it, or a job of an earlier build still runs.
    """
    with _opened(folder / LOCK_FILE) as build, _opened(folder / JOBS_FILE) as jobs:
        if not _locked(build, fcntl.LOCK_EX):
            raise ColdpressError(
                f"another build of {folder.name} runs{_holder(build)}; wait for it or name another build_dir"
            )
        if not _locked(jobs, fcntl.LOCK_EX):
            raise ColdpressError(
                f"a job of an earlier build of {folder.name} still runs{_holder(jobs)}; wait for it or end it"
            )
        build.truncate(0)
        os.environ[BUILD_VARIABLE] = _sign(build, "build")
        jobs.truncate(0)
        fcntl.flock(jobs, fcntl.LOCK_UN)
        yield


@contextmanager
def job_lock(folder: Path, stage: str) -> Iterator[None]:
    """Shares the lock of the jobs of the build in `folder` within the block.

    Raises:
        ColdpressError: if the job is of a build that was ended, and another one has begun since.
    """
    with _opened(folder / JOBS_FILE) as jobs:
        with _opened(folder / LOCK_FILE) as build:
            build.seek(0)
            current = build.read()
        if not _locked(jobs, fcntl.LOCK_SH) or os.environ.get(BUILD_VARIABLE, current) != current:
            raise ColdpressError(f"this job, {stage}, is of a build that has ended, and another one has begun since")
        _sign(jobs, stage)
        yield


def _opened(file: Path) -> IO[str]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("a+", encoding="utf-8")
    except OSError as error:
        raise ColdpressError(
            f"cannot build in {file.parent}: {error.strerror}, at {error.filename}; name another build_dir"
        ) from error


def _locked(file: IO[str], kind: int) -> bool:
    """Whether the lock was to be had at once."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise ColdpressError(
            f"cannot lock {file.name}: {error.strerror}; name a build_dir on a file system that has locks"
        ) from error
    return True


def _sign(file: IO[str], what: str) -> str:
    """Adds this process to those that the file names, for other machines too; gives the line."""
    line = json.dumps([what, os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S")]) + "\n"
    file.write(line)
    file.flush()
    os.fsync(file.fileno())
    return line


def _holder(file: IO[str]) -> str:
    """The first of a file's processes that still runs, as a clause; empty if none says so in time."""
    here = socket.gethostname()
    deadline = time.monotonic() + TELLING_S
    while time.monotonic() < deadline:
        file.seek(0)
        for what, process, host, since in map(json.loads, file.read().splitlines()):
            if host != here or _runs(process):
                role = "" if what == "build" else f", {what}"
                place = "" if host == here else f" on {host}"
                return f"{role}, process {process}{place}, since {since}"
        time.sleep(0.02)
    return ""


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
