"""Ends a snakemake run: with the summary of what was built (compiler/workflow/summary.py), or with why it was not.

The summary is printed when the process ends, after everything that snakemake prints and even with `--quiet all`. A run
that finds nothing to do calls no hook of the workflow, so this module listens to snakemake's log.

Beyond the documented interface it takes the message of a run with nothing to do, and of `workflow` what was asked for
(`dag_settings`, `dryrun`, `is_main_process`) and the logs of the jobs that did not finish (`dag.needrun_jobs()`):
`onerror` is told only snakemake's own log.
"""

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake.logging import logger

from coldpress.compiler.workflow import summary
from coldpress.compiler.workflow.last_words import NOTE, REFUSAL, REFUSED, Mark, last_words, marks, no_room, not_built
from coldpress.compiler.workflow.settings import BuildConfig

UP_TO_DATE = "everything is up to date"


class Ending(logging.Handler):
    """Prints the last lines of a run: summaries, or why builds failed."""

    def __init__(
        self, workflow: Any, builds: Mapping[str, BuildConfig], called_from: Path, checked: Callable[..., str]
    ) -> None:
        """Starts listening.

        Args:
            builds: The builds by name; matrix.py names them.
            called_from: The user's folder; Snakemake works in that of the builds.
            checked: Calls a function; if it raises, ends the process with the error's sentence.
        """
        super().__init__(logging.INFO)
        self._workflow, self._builds, self._called_from, self._checked = workflow, builds, called_from, checked
        self._before: dict[Path, Mark] = {}
        self._published = {
            name: _time_of(build.target_folder / "publish.json") if build.artifact.exists() else None
            for name, build in builds.items()
        }
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == NOTHING_TO_BE_DONE_MSG and self._is_whole():
            self._say(f"{UP_TO_DATE}\n")

    def begin(self) -> None:
        self._before = marks(self._logs())

    def built(self) -> None:
        if self._is_whole():
            self._say("")

    def failed(self) -> None:
        """Ends the process with the sentences of the jobs that failed."""
        self._fetch_logs()
        unfinished, failed = self._logs(), []
        for name, build in self._builds.items():
            logs = {log: rule for log, rule in unfinished.items() if _is_of(log, build)}
            if logs:
                self._note_earlier(name, build)
                failed.append((name, *self._last_words(logs, build.folder)))
        if len(self._builds) == 1 or not failed:  # or it was no job of a build that failed
            sentence, code = failed[0][1:] if failed else last_words(unfinished, self._before)
        else:
            for name, why, _ in failed:
                print(not_built(name, why), file=sys.stderr)
            names = ", ".join(name for name, *_ in failed)
            sentence, code = f"{REFUSAL}{len(failed)} of {len(self._builds)} builds failed: {names}", REFUSED
        print(sentence, file=sys.stderr, flush=True)
        sys.exit(code)

    def _last_words(self, logs: Mapping[Path, str], folder: Path) -> tuple[str, int]:
        """Returns the last line of a build and its exit code; on a full disk no job could write a sentence."""
        line, code = last_words(logs, self._before)
        full = no_room(folder) if code != REFUSED else None
        return (full, REFUSED) if full else (line, code)

    def _say(self, before: str) -> None:
        folders = {name: build.target_folder for name, build in self._builds.items()}
        with contextlib.chdir(self._called_from):
            if len(folders) == 1:
                text = self._checked(summary.show, *folders.values())
            else:
                text = self._checked(summary.show_all, folders)
        atexit.register(print, before + text, flush=True)

    def _note_earlier(self, name: str, build: BuildConfig) -> None:
        published = self._published[name]
        if published is not None and _time_of(build.target_folder / "publish.json") == published:
            shown = os.path.relpath(build.artifact, self._called_from)
            print(f"{NOTE}{shown} is of an earlier build and was left as it is, with its report", file=sys.stderr)

    def _is_whole(self) -> bool:
        """Tells whether the user asked for whole builds, not for a part or a dry run."""
        asked = self._workflow.dag_settings
        partial = set(asked.targets) - {"all"} or asked.target_jobs or asked.until or asked.omit_from
        return self._workflow.is_main_process and not self._workflow.dryrun and not partial

    def _fetch_logs(self) -> None:
        for job in self._workflow.dag.needrun_jobs():
            for path in job.log:
                if path.is_storage and not Path(path).exists() and path.storage_object.exists():
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    path.storage_object.retrieve_object()

    def _logs(self) -> Mapping[Path, str]:
        """Returns log -> rule for the unfinished jobs."""
        jobs = self._workflow.dag.needrun_jobs()
        return {Path(path).absolute(): job.rule.name for job in jobs for path in job.log}


def _is_of(log: Path, build: BuildConfig) -> bool:
    """Returns whether a log is of a job that the build needs: its own, or one that all builds of its model share."""
    places = build.target_folder, build.folder / "logs"
    return any(log.is_relative_to(place) for place in places)


def _time_of(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
