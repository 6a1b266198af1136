"""Prints the summary (compiler/workflow/summary.py) at the end of a snakemake run that leaves a whole artifact.

It is printed when the process ends, after everything that snakemake prints and even with `--quiet all`. A run that
finds nothing to do calls no hook of the workflow, so this module listens to snakemake's log.

Beyond the documented interface it takes the message of a run with nothing to do, and of `workflow` what was asked for
(`dag_settings`, `dryrun`, `is_main_process`).
"""

import atexit
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake.logging import logger

from coldpress.compiler.workflow import summary

UP_TO_DATE = "everything is up to date"


class Ending(logging.Handler):
    """Watches snakemake's log for a run with nothing to do; the workflow calls `built` after any other."""

    def __init__(self, workflow: Any, folder: Path, called_from: Path, checked: Callable[..., str]) -> None:
        """Starts listening.

        Args:
            workflow: Snakemake's workflow object.
            folder: The build folder of one device.
            called_from: The user's folder; Snakemake works in the build folder.
            checked: Calls a function; if it raises, ends the process with the error's sentence.
        """
        super().__init__(logging.INFO)
        self._workflow, self._folder, self._called_from, self._checked = workflow, folder, called_from, checked
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Handles one record of snakemake's log."""
        if record.msg == NOTHING_TO_BE_DONE_MSG and self._is_build():
            self._say(f"{UP_TO_DATE}\n")

    def built(self) -> None:
        """Takes note that all jobs are done."""
        if self._is_build():
            self._say("")

    def _say(self, before: str) -> None:
        with contextlib.chdir(self._called_from):
            text = self._checked(summary.show, self._folder)
        atexit.register(print, before + text, flush=True)

    def _is_build(self) -> bool:
        """Tells whether the user asked for the whole build, not for a part or a dry run."""
        asked = self._workflow.dag_settings
        partial = set(asked.targets) - {"all"} or asked.target_jobs or asked.until or asked.omit_from
        return self._workflow.is_main_process and not self._workflow.dryrun and not partial
