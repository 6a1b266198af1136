"""Finds the sentence that says why a build failed; snakemake's own last lines do not.

A stage that refuses its input ends its log with `error: ` and one sentence. This module reads the logs of the jobs,
here or on a cluster, whatever snakemake was told to print, and returns the last line of the build with its exit code.
"""

import errno
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

REFUSAL, NOTE = "error: ", "note: "
NOT_BUILT = " was not built: "
REFUSED, FAILED = 2, 1
"""Exit codes: bad input, which one sentence explains; anything else."""
NO_SENTENCE, NO_JOB = "ended without a sentence of its own", "no job began"
"""Marks of the lines that end a build without a refusal."""
ANY = re.compile("")
TAIL_BYTES = 1 << 16
ROOM_BYTES = 1 << 20
"""Free bytes of a disk below which a build that ended without a sentence ended for want of room."""
Mark = tuple[int, int, int]


def marks(logs: Mapping[Path, str]) -> dict[Path, Mark]:
    """Returns inode, modification time and size of every existing log: they change when the log is written again."""
    found = {}
    for log in logs:
        if log.exists():
            status = log.stat()
            found[log] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def last_words(logs: Mapping[Path, str], before: Mapping[Path, Mark]) -> tuple[str, int]:
    """Returns the last line of a failed build and its exit code, from the logs of the jobs that did not finish (log ->
    rule). The job of a log whose mark is the one `before` the build never began."""
    now = marks(logs)
    written = sorted((log for log in now if now[log] != before.get(log)), key=lambda log: now[log][1])
    for log in written:
        line = last_line(log)
        if line.startswith(REFUSAL):
            return line, REFUSED
    if not written:
        return f"{REFUSAL}{NO_JOB}, or none could write its log; snakemake's own output says why", FAILED
    log = written[0]
    return f"{REFUSAL}{logs[log]} {NO_SENTENCE}: it was killed, or there is a bug; its log is {log}", FAILED


def no_room(folder: Path) -> str | None:
    """Returns the last line of a build whose disk is full; None if it is not."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{REFUSAL}{folder}: {error.strerror}; free some room or choose another build_dir, then build again"
    return None


def not_built(name: str, why: str) -> str:
    """Returns the line for one of several builds, which failed."""
    return f"{NOTE}{name}{NOT_BUILT}{why.removeprefix(REFUSAL)}"


def why_not_built(line: str) -> tuple[str, str] | None:
    """Returns name and reason from such a line; None for any other."""
    name, is_one, why = line.removeprefix(NOTE).rstrip("\n").partition(NOT_BUILT)
    return (name, why) if is_one and line.startswith(NOTE) else None


def exit_code(line: str) -> int:
    """Returns the exit code of a build that ended with this line; see `last_words`."""
    subject = line.removeprefix(REFUSAL)
    crashed = subject.startswith(NO_JOB) or subject.partition(" ")[2].startswith(NO_SENTENCE)
    return FAILED if crashed else REFUSED


def last_line(log: Path, like: re.Pattern[str] = ANY) -> str:
    """Returns the last line of a log that exists, of those that are `like` a pattern; empty if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return next((line for line in reversed(lines) if like.search(line)), "")
