"""Shortens snakemake's output to one line per finished step, then the summary, and ends with the build's exit code.

    snakemake … 2>&1 | python -m coldpress.compiler.workflow.progress

On a terminal, the steps that run stand below, each with the last line of its log. In a pipe, what a long step says of
its progress becomes a line, at most every PIPE_EVERY_S seconds.

A build that is refused ends with its one sentence. Where there is no such sentence (a crash, a run that was killed or
that never started) everything that snakemake said from the first error on is printed.
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coldpress.compiler.workflow.last_words import FAILED, NOTE, REFUSAL, exit_code, last_line

FOLDER = "Building in "
"""Begins the line that says where logs lie (compiler/workflow/around_snakemake.py)."""
RULE = re.compile(r"(?:local)?rule (\S+):$")
LOG = re.compile(r"\s+log: (.+?)(?: \(|$)")
JOB_ID = re.compile(r"\s+jobid: (\d+)")
FINISHED = re.compile(r"Finished jobid: (\d+) \(Rule: (\S+)\)")
STEP = re.compile(r": \d+ of \d+ .*, about .* left$")
BROKEN = re.compile(r"Error in rule (\S+):")
CHUNK = re.compile(r"\s+wildcards: chunk=(\d+)-(\d+)")
STEPS = re.compile(r"(\d+) of (\d+) steps \(\d+%\) done")
TROUBLE = re.compile(r"(\w*Error\b|error:|Error in rule|MissingInput|Exiting because|\w*Exception\b)")
ALL = "all"
"""The rule that does nothing but want what others make."""
UP_TO_DATE, DRY_RUN = "Nothing to be done", "This was a dry-run"
PIPE_EVERY_S = 10.0
LAST_OF_SNAKEMAKE = re.compile(r"(Complete log\(s\): |Elapsed time: )")
"""Snakemake's lines between the last step and the summary (compiler/workflow/ending.py)."""


@dataclass(frozen=True)
class ShownJob:
    rule: str
    log: Path | None
    """None for a job without a log."""
    start_s: float


@dataclass
class Running:
    folder: Path = field(default_factory=Path)
    jobs: dict[str, ShownJob] = field(default_factory=dict[str, ShownJob])
    _rule: str = ""
    _log: Path | None = None

    def see(self, line: str, now_s: float) -> None:
        if line.startswith(FOLDER):
            self.folder = Path(line.removeprefix(FOLDER))
        elif found := RULE.match(line):
            self._rule, self._log = found[1], None
        elif found := LOG.match(line):
            self._log = self.folder / found[1].partition(",")[0]
        elif self._rule and (found := JOB_ID.match(line)):
            self.jobs[found[1]] = ShownJob(self._rule, self._log, now_s)
            self._rule = ""
        elif found := FINISHED.match(line):
            self.jobs.pop(found[1], None)
        elif found := BROKEN.match(line):
            self.jobs = {number: job for number, job in self.jobs.items() if job.rule != found[1]}

    def status(self, now_s: float) -> str:
        """Returns one line for each running job: its rule, its seconds, and the last line of its log."""
        return "\n".join(_status(job, now_s) for job in list(self.jobs.values()))

    def progress(self) -> list[str]:
        """Returns for each running job the last line of its log that tells how far it is (compiler/steps.py)."""
        logs = (job.log for job in list(self.jobs.values()) if job.log is not None and job.log.exists())
        return list(filter(None, (last_line(log, STEP) for log in logs)))


def _status(job: ShownJob, now_s: float) -> str:
    said = "" if job.log is None or not job.log.exists() else last_line(job.log).removeprefix(f"{job.rule}: ")
    return f"{job.rule}, {now_s - job.start_s:.0f} s" + (f": {said}" if said else "")


def shorten(lines: Iterable[str], clock: Iterator[float]) -> Generator[str, None, int]:
    """Yields one line per finished step, and the summary or the error; returns the exit code of the build. A step that
    failed and was tried again with success is no error. `lines` is Snakemake's output, without line ends; `clock` gives
    seconds since the start, read once per finished step."""
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
            chunk_of[job] = f", layers {int(found[1])}-{int(found[2])}"
        elif found := FINISHED.match(line):
            finished, rule = found.groups()
        elif found := STEPS.match(line):
            name = "done" if rule == ALL else rule + chunk_of.get(finished, "")
            yield f"[{int(found[1]):3d}/{found[2]}] {name:24s} {next(clock):6.1f} s"
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


@contextmanager
def shown(running: Running) -> Generator[Callable[[str], None]]:
    """Shows the running jobs where standard output is a terminal; yields what prints a line."""
    if not sys.stdout.isatty():
        with told_now_and_then(running):
            yield lambda line: print(line, flush=True)
        return
    from rich.console import Console  # here: a pipe needs none of it
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(
        console=console,
        get_renderable=lambda: Text(running.status(time.monotonic()), style="dim", overflow="ellipsis", no_wrap=True),
        refresh_per_second=2,
        transient=True,
    ):
        yield lambda line: console.print(Text(line), soft_wrap=True)


def told_now_and_then(running: Running, every_s: float = PIPE_EVERY_S) -> AbstractContextManager[None]:
    """Prints the progress of running jobs, where it is new, every so many seconds."""
    told = set[str]()

    def tell() -> None:
        new = [line for line in running.progress() if line not in told]
        told.update(new)
        print(*(f"{'':9s} {line}" for line in new), sep="\n", end="\n" if new else "", flush=True)

    return repeating(every_s, tell)


@contextmanager
def repeating(every_s: float, do: Callable[[], object]) -> Generator[None]:
    """Calls `do` every so many seconds, in a thread of its own, until the block ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            do()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def follow(lines: Iterable[str]) -> int:
    """Prints snakemake's output as it comes, shortened; returns the exit code of the build."""
    start, running = time.monotonic(), Running()
    clock = iter(lambda: time.monotonic() - start, None)

    def seen() -> Iterator[str]:
        for line in lines:
            running.see(line.rstrip("\n"), time.monotonic())
            yield line.rstrip("\n")

    shortened = shorten(seen(), clock)
    with shown(running) as show:
        while True:
            try:
                line = next(shortened)
                show(line) if not line.startswith(REFUSAL) else print(line, file=sys.stderr)
            except StopIteration as ended:
                return ended.value


if __name__ == "__main__":
    sys.exit(follow(sys.stdin))
