"""All that the workflow needs of Snakemake beyond its documented interface; tests hold it to the pinned version.

Four things cannot be had with rules alone. Snakemake works in the folder of the model's builds, wherever it is called
from, so that what it knows of them lies beside them. A lock is held from before it plans until it ends. A folder whose
results nothing is known of is refused. When a build fails, the sentence of the job that failed comes last.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from snakemake_interface_executor_plugins.settings import ExecMode

from coldpress.compiler.device import host
from coldpress.compiler.lock import build_lock
from coldpress.compiler.needs import Inputs
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.workflow.ending import Ending
from coldpress.compiler.workflow.last_words import Mark, last_words, marks
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.manifest import MANIFEST_FILE

CALLED_FROM = "COLDPRESS_CALLED_FROM"
"""Environment variable with the folder where the user is: a job's snakemake starts in the build folder."""
OWN_FOLDER = ".snakemake"
T = TypeVar("T")


def checked(function: Callable[..., T], *arguments: Any) -> T:
    """The function's result; bad input ends Snakemake with one sentence and exit code 2."""
    try:
        return function(*arguments)
    except ColdpressError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def start(workflow: Any, root: Path) -> None:
    """Makes this process and its jobs use the compiler of the Snakefile's checkout, from where the user called.

    Args:
        workflow: Snakemake's.
        root: Of the coldpress that is imported.
    """
    checkout = str(workflow.basedir)
    if root != Path(checkout).resolve():
        # an editable install wins over PYTHONPATH, and its stages would run unseen instead of these
        sys.exit(f"error: {sys.executable} runs the coldpress of {root}; run make env in {checkout}")
    os.environ["COLDPRESS_CHECKOUT"] = checkout  # for profiles/kubernetes
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    if not is_users(workflow):
        os.chdir(os.environ.get(CALLED_FROM, os.curdir))
    os.environ[CALLED_FROM] = os.getcwd()


def is_users(workflow: Any) -> bool:
    """Whether this is the Snakemake that the user started, and not the one of a job."""
    return workflow.exec_mode == ExecMode.DEFAULT


def all_jobs_run_here(workflow: Any) -> bool:
    """Whether every job of the build runs on this machine."""
    return is_users(workflow) and not workflow.remote_exec


def work_in(workflow: Any, folder: Path, target: str) -> None:
    """Makes the folder of the model's builds the working directory, in spite of --directory; takes its lock for the
    whole of Snakemake's run, and limits jobs that run side by side to the memory of this machine.

    Args:
        workflow: Snakemake's.
        folder: Of the model's builds.
        target: The device, and the label, of this build.

    Raises:
        ColdpressError: if the folder cannot be made, or nothing is known of the results in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for link in (folder / target / MANIFEST_FILE, folder / target / "package" / MANIFEST_FILE):
            if link.is_symlink() and not link.exists():  # the artifact was deleted; such a link ends Snakemake
                link.unlink()
        has_results = any(folder.glob("*.json")) or any(folder.glob("*/*.json"))
        if is_users(workflow) and has_results and not (folder / OWN_FOLDER).exists():
            raise ColdpressError(
                f"nothing says what made the results in {folder}: {OWN_FOLDER} is missing there; copy it from where "
                "they were made, or remove the folder to make all of them again"
            )
        workflow.workdir(folder) if workflow.overwrite_workdir is None else os.chdir(folder)
    except OSError as error:
        raise ColdpressError(f"cannot build in {folder}: {error.strerror}; name another build_dir") from error
    workflow.execute = _locked(workflow, folder, workflow.execute)
    if all_jobs_run_here(workflow) and workflow.global_resources.get("mem_mb") is None:
        workflow.register_resource("mem_mb", host.free_dram_bytes() // 10**6)


def _locked(workflow: Any, folder: Path, execute: Callable[..., Any]) -> Callable[..., Any]:
    """Snakemake's run, which plans and executes, under the lock of the build; a dry run needs none.

    `onstart` would be too late: what is to be done is decided before, and a run with nothing to do does not call it.
    """

    def run(*, executor_plugin: Any, **others: Any) -> Any:
        if not is_users(workflow) or executor_plugin.common_settings.dryrun_exec:
            return execute(executor_plugin=executor_plugin, **others)
        with ExitStack() as held:
            checked(held.enter_context, build_lock(folder))
            return execute(executor_plugin=executor_plugin, **others)

    return run


def inputs_of(rules: Any, targets: Sequence[str]) -> Inputs:
    """Stage -> record parameter -> the stage whose record it takes, for all stages that the targets need.

    A record is called after its stage: <stage>.json, or <stage>/<chunk>.json.
    """
    found: dict[str, dict[str, str]] = {}
    pending = [*targets]
    while pending:
        stage = pending.pop()
        if stage in found or stage not in STAGES:
            continue
        named = ((name, [files] if isinstance(files, str) else list(files)) for name, files in _items(rules, stage))
        writers = {name: _writer(files[0]) for name, files in named if files}
        found[stage] = {name: writer for name, writer in writers.items() if writer is not None}
        pending += found[stage].values()
    return {stage: found[stage] for stage in STAGES if stage in found}


def _items(rules: Any, stage: str) -> list[tuple[str, Any]]:
    return list(getattr(rules, stage).input.items())


def _writer(file: str) -> str | None:
    """The stage that writes a record; None for the shards that a stage puts together itself."""
    path = Path(file)
    return next((name for name in (path.stem, path.parent.name) if name in (*STAGES, "device")), None)


class LastWords:
    """What the user reads last: what the build gave, or why it failed."""

    def __init__(self, workflow: Any, folder: Path, artifact: Path) -> None:
        """Begins to listen to Snakemake.

        Args:
            workflow: Snakemake's.
            folder: Of the build for a device.
            artifact: Its final name.
        """
        self._workflow, self._folder, self._artifact = workflow, folder, artifact
        self._before: dict[Path, Mark] = {}
        self._published = _time_of(folder / "publish.json") if artifact.exists() else None
        self._ending = Ending(workflow, folder, checked)

    def begin(self) -> None:
        """Jobs are about to start."""
        self._before = marks(self._logs())

    def built(self) -> None:
        """All jobs are done."""
        self._ending.built()

    def failed(self) -> None:
        """Ends the process with the sentence of the job that failed."""
        if self._published is not None and _time_of(self._folder / "publish.json") == self._published:
            shown = os.path.relpath(self._artifact, self._workflow.workdir_init)
            print(f"note: {shown} is of an earlier build and was left as it is, with its report", file=sys.stderr)
        sentence, code = last_words(self._logs(), self._before)
        print(sentence, file=sys.stderr, flush=True)
        sys.exit(code)

    def _logs(self) -> Mapping[Path, str]:
        """Log -> rule, of the jobs that are not finished."""
        jobs = self._workflow.dag.needrun_jobs()
        return {Path(path).absolute(): job.rule.name for job in jobs for path in job.log}


def _time_of(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
