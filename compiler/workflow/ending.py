"""The last words of a snakemake run that leaves a whole artifact: what the build gave (compiler/workflow/summary.py).

They are printed when the process ends, behind everything that snakemake says and whatever it is told to be quiet about.
A run that finds nothing to do calls no hook of the workflow, so that is heard from snakemake's own log.
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
    """Listens whether there is anything to do; is told when it is done."""

    def __init__(self, workflow: Any, folder: Path, checked: Callable[..., str]) -> None:
        """Begins to listen.

        Args:
            workflow: Snakemake's.
            folder: Of the build for a device.
            checked: Calls a function and ends the process with the sentence of what it raises.
        """
        super().__init__(logging.INFO)
        self._workflow, self._folder, self._checked = workflow, folder, checked
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Snakemake's log, record by record."""
        if record.msg == NOTHING_TO_BE_DONE_MSG and self._is_build():
            self._say(f"{UP_TO_DATE}\n")

    def built(self) -> None:
        """All jobs are done."""
        if self._is_build():
            self._say("")

    def _say(self, before: str) -> None:
        with contextlib.chdir(self._workflow.workdir_init):  # where the user is; snakemake works in the build folder
            text = self._checked(summary.show, self._folder)
        atexit.register(print, before + text, flush=True)

    def _is_build(self) -> bool:
        """Whether all of the build was asked for, and not a part, or what would be done."""
        asked = self._workflow.dag_settings
        partial = asked.targets - {"all"} or asked.target_jobs or asked.until or asked.omit_from
        return self._workflow.is_main_process and not self._workflow.dryrun and not partial
