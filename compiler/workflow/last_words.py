"""Why a build failed, in the words of the job that did: snakemake's own last lines do not say it, or say nothing.

A stage that refuses ends its log with `error: ` and one sentence. Reads the logs of jobs, here or on a cluster,
whatever snakemake was told to print, and gives the line that ends the build's output, with its exit code.
"""

from collections.abc import Mapping
from pathlib import Path

REFUSAL = "error: "
REFUSED, FAILED = 2, 1
"""Exit codes: bad input, said in one sentence; anything else."""
TAIL_BYTES = 1 << 16
Mark = tuple[int, int, int]


def marks(logs: Mapping[Path, str]) -> dict[Path, Mark]:
    """What changes when a log is written again, of those that exist."""
    found = {}
    for log in logs:
        if log.exists():
            status = log.stat()
            found[log] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def last_words(logs: Mapping[Path, str], before: Mapping[Path, Mark]) -> tuple[str, int]:
    """(last line of a failed build, its exit code).

    Args:
        logs: Log -> rule, of the jobs that did not finish.
        before: The marks of their logs when the build began; a log that is as it was is of a job that never began.
    """
    now = marks(logs)
    written = sorted((log for log in now if now[log] != before.get(log)), key=lambda log: now[log][1])
    for log in written:
        line = _last_line(log)
        if line.startswith(REFUSAL):
            return line, REFUSED
    if not written:
        return f"{REFUSAL}no job began, or none could write its log; snakemake's own output says why", FAILED
    log = written[0]
    return (
        f"{REFUSAL}{logs[log]} ended without a sentence of its own: it was killed, or there is a bug; its log is {log}",
        FAILED,
    )


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
