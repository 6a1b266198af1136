"""Allows one build at a time per folder, by locks that end with their processes.

A build holds `.lock` alone, from before Snakemake looks at any file until it ends. Its jobs share `.jobs`: after a
build is killed they run on and write, here or on cluster nodes, and no build begins before the last job has ended; a
job that was still waiting in the cluster's queue refuses to run. The files name their holders; only the system knows
whether a lock is held, so a leftover file means nothing. Snakemake's own lock is such a file: the default workflow
profile turns it off.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from coldpress.schemas.errors import ColdpressError

LOCK_FILE, JOBS_FILE = ".lock", ".jobs"
BUILD_VARIABLE = "COLDPRESS_BUILD"
"""Environment variable that tells jobs their build: the content of its lock file."""
TELLING_S = 1.0
"""Seconds that a holder may take to write its name."""


@contextmanager
def build_locks(folders: Sequence[Path]) -> Iterator[None]:
    """Holds each folder's build lock within the block; raises ColdpressError if another build or a job runs."""
    sign = _signature("build")
    with ExitStack() as held:
        for folder in folders:
            held.enter_context(_build_lock(folder, sign))
        os.environ[BUILD_VARIABLE] = sign
        held.callback(os.environ.pop, BUILD_VARIABLE)
        yield


@contextmanager
def _build_lock(folder: Path, sign: str) -> Iterator[None]:
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
        _write(build, sign)
        jobs.truncate(0)
        fcntl.flock(jobs, fcntl.LOCK_UN)
        yield


@contextmanager
def job_lock(folder: Path, stage: str) -> Iterator[None]:
    """Shares the job lock of a build within the block; raises ColdpressError if another build has begun since."""
    with _opened(folder / JOBS_FILE) as jobs:
        is_free = _locked(jobs, fcntl.LOCK_SH)
        with _opened(folder / LOCK_FILE) as build:  # read under the lock: a build writes it while it holds both
            build.seek(0)
            current = build.read()
        if not is_free or os.environ.get(BUILD_VARIABLE, current) != current:
            raise ColdpressError(f"job {stage} belongs to a build that has ended; a newer build owns this folder now")
        _write(jobs, _signature(stage))
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
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise ColdpressError(
            f"cannot lock {file.name}: {error.strerror}; name a build_dir on a file system that has locks"
        ) from error
    return True


def _signature(what: str) -> str:
    """Returns the line that names this process as a holder, also to other machines; no two are equal."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return json.dumps([what, os.getpid(), socket.gethostname(), since, time.time_ns()]) + "\n"


def _write(file: IO[str], line: str) -> None:
    file.write(line)
    file.flush()
    os.fsync(file.fileno())


def _holder(file: IO[str]) -> str:
    """Describes the first named process that still runs, in a clause; empty if no holder is named in time."""
    here = socket.gethostname()
    deadline = time.monotonic() + TELLING_S
    while time.monotonic() < deadline:
        file.seek(0)
        for what, process, host, since, _ in map(json.loads, file.read().splitlines()):
            if host != here or _runs(process):
                role = "" if what == "build" else f", {what}"
                place = "" if host == here else f" on {host}"
                return f"{role}, process {process}{place}, since {since}"
        time.sleep(0.02)
    return ""


def _runs(process: int) -> bool:
    try:
        with suppress(PermissionError):  # another user's
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
