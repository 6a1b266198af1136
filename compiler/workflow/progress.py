"""Makes snakemake's output short: `snakemake … 2>&1 | python -m coldpress.compiler.workflow.progress` prints one line
per finished step, and what the build gave.

Nothing is lost when something fails: from the first error on, and if the run ends early, all of it is printed.
"""

import re
import sys
import time
from collections.abc import Iterable, Iterator

JOB_ID = re.compile(r"\s+jobid: (\d+)")
CHUNK = re.compile(r"\s+wildcards: chunk=(\d+)-(\d+)")
FINISHED = re.compile(r"Finished jobid: (\d+) \(Rule: (\w+)\)")
STEPS = re.compile(r"(\d+) of (\d+) steps \(\d+%\) done")
TROUBLE = re.compile(r"(\w*Error\b|error:|Error in rule|MissingInput|Exiting because|\w*Exception\b)")
UP_TO_DATE = "Nothing to be done"
LAST_OF_SNAKEMAKE = re.compile(r"(\d+ of \d+ steps |Complete log\(s\): |Elapsed time: )")
"""What snakemake says when all is done, before the build's own ending (compiler/workflow/ending.py)."""


def shorten(lines: Iterable[str], clock: Iterator[float]) -> Iterator[str]:
    """One line per finished step, the build's ending, and everything from the first error on; all of it if no step ever
    finished.

    Args:
        lines: Snakemake's output, without line ends.
        clock: Seconds since the start, read once per finished step.
    """
    chunk_of: dict[str, str] = {}
    hidden: list[str] = []
    job = rule = finished = ""
    done = failed = False
    for line in lines:
        failed = failed or bool(TROUBLE.match(line))
        if failed:
            yield line
            continue
        if done and not LAST_OF_SNAKEMAKE.match(line):
            yield line
        hidden.append(line)
        if found := JOB_ID.match(line):
            job = found[1]
        elif found := CHUNK.match(line):
            chunk_of[job] = f" {int(found[1])}-{int(found[2])}"
        elif found := FINISHED.match(line):
            finished, rule = found.groups()
        elif found := STEPS.match(line):
            yield f"[{int(found[1]):3d}/{found[2]}] {rule + chunk_of.get(finished, ''):24s} {next(clock):6.1f} s"
        done = done or line.startswith(UP_TO_DATE) or bool(found and rule == "all")
    if not (done or failed):
        yield from hidden


def main() -> int:
    """Entry point: filters standard input."""
    start = time.monotonic()
    clock = iter(lambda: time.monotonic() - start, None)
    for line in shorten((line.rstrip("\n") for line in sys.stdin), clock):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
