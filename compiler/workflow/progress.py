"""Shortens snakemake's output to one line per finished step, then the summary, and ends with the build's exit code.

    snakemake … 2>&1 | python -m coldpress.compiler.workflow.progress

A build that is refused ends with its one sentence. Where there is no such sentence (a crash, a run that was killed or
that never started) everything that snakemake said from the first error on is printed.
"""

import re
import sys
import time
from collections.abc import Generator, Iterable, Iterator

from coldpress.compiler.workflow.last_words import FAILED, REFUSAL, exit_code

JOB_ID = re.compile(r"\s+jobid: (\d+)")
CHUNK = re.compile(r"\s+wildcards: chunk=(\d+)-(\d+)")
FINISHED = re.compile(r"Finished jobid: (\d+) \(Rule: (\w+)\)")
STEPS = re.compile(r"(\d+) of (\d+) steps \(\d+%\) done")
BROKEN = re.compile(r"Error in rule (\w+)")
TROUBLE = re.compile(r"(\w*Error\b|error:|Error in rule|MissingInput|Exiting because|\w*Exception\b)")
UP_TO_DATE, DRY_RUN = "Nothing to be done", "This was a dry-run"
NOTE = "note: "
LAST_OF_SNAKEMAKE = re.compile(r"(Complete log\(s\): |Elapsed time: )")
"""Snakemake's lines between the last step and the summary (compiler/workflow/ending.py)."""


def shorten(lines: Iterable[str], clock: Iterator[float]) -> Generator[str, None, int]:
    """Yields one line per finished step, and the summary or the error; returns the exit code of the build.

    A step that failed and was tried again with success is no error.

    Args:
        lines: Snakemake's output, without line ends.
        clock: Seconds since the start, read once per finished step.
    """
    chunk_of: dict[str, str] = {}
    hidden: list[str] = []
    trouble: list[str] = []
    job = rule = finished = ""
    done = False
    for line in lines:
        hidden.append(line)
        if trouble or TROUBLE.match(line):
            trouble.append(line)
        elif done and not LAST_OF_SNAKEMAKE.match(line):
            yield line
        found: re.Match[str] | None = None
        if line.startswith(NOTE):
            yield line
        elif found := BROKEN.match(line):
            yield f"{'':9s} {found[1]:24s} failed"
        elif found := JOB_ID.match(line):
            job = found[1]
        elif found := CHUNK.match(line):
            chunk_of[job] = f" {int(found[1])}-{int(found[2])}"
        elif found := FINISHED.match(line):
            finished, rule = found.groups()
        elif found := STEPS.match(line):
            yield f"[{int(found[1]):3d}/{found[2]}] {rule + chunk_of.get(finished, ''):24s} {next(clock):6.1f} s"
        if line.startswith((UP_TO_DATE, DRY_RUN)) or (found and found.re is STEPS and found[1] == found[2]):
            done, trouble = True, []
        if line.startswith(DRY_RUN):
            yield from hidden
    if done and not trouble:
        return 0
    return (yield from _why(trouble or hidden))


def _why(lines: list[str]) -> Generator[str, None, int]:
    """Yields the sentence that a build was refused with, or all `lines` where they end without one."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    code = exit_code(last) if last.startswith(REFUSAL) else FAILED
    if code == FAILED:
        yield from (line for line in lines if not line.startswith(NOTE))
    else:
        yield last
    return code


def main() -> int:
    """Filters standard input; the exit code is that of the build."""
    start = time.monotonic()
    clock = iter(lambda: time.monotonic() - start, None)
    lines = shorten((line.rstrip("\n") for line in sys.stdin), clock)
    while True:
        try:
            print(next(lines), flush=True)
        except StopIteration as ended:
            return ended.value


if __name__ == "__main__":
    sys.exit(main())
