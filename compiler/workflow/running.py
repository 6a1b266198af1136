"""Tells which jobs of a build run, and what each says of itself in its log."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from coldpress.compiler.workflow.last_words import last_line

FOLDER = "Building in "
"""Begins the line that says where logs lie (compiler/workflow/around_snakemake.py)."""
RULE = re.compile(r"(?:local)?rule (\S+):$")
LOG = re.compile(r"\s+log: (.+?)(?: \(|$)")
JOB_ID = re.compile(r"\s+jobid: (\d+)")
FINISHED = re.compile(r"Finished jobid: (\d+) \(Rule: (\S+)\)")
STEP = re.compile(r": \d+ of \d+ .*, about .* left$")
BROKEN = re.compile(r"Error in rule (\S+):")


@dataclass(frozen=True)
class Job:
    rule: str
    log: Path | None
    """None for a job without a log."""
    start_s: float


@dataclass
class Running:
    folder: Path = field(default_factory=Path)
    jobs: dict[str, Job] = field(default_factory=dict[str, Job])
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
            self.jobs[found[1]] = Job(self._rule, self._log, now_s)
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


def _status(job: Job, now_s: float) -> str:
    said = "" if job.log is None or not job.log.exists() else last_line(job.log).removeprefix(f"{job.rule}: ")
    return f"{job.rule}, {now_s - job.start_s:.0f} s" + (f": {said}" if said else "")
