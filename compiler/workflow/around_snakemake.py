"""Does what the workflow needs of Snakemake beyond its documented interface; tests hold it to the pinned version.

Rules alone cannot do four things. Snakemake works in the folder of the model's builds, wherever it is called from, so
that its metadata lies beside the results. A lock is held from before it plans until it ends. A folder with results but
without metadata is refused. When a build fails, the sentence of the failed job comes last.
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
from coldpress.compiler.workflow.running import FOLDER
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.manifest import MANIFEST_FILE

CALLED_FROM = "COLDPRESS_CALLED_FROM"
"""Environment variable with the folder where the user is: a job's snakemake starts in the build folder."""
OWN_FOLDER = ".snakemake"
T = TypeVar("T")


def checked(function: Callable[..., T], *arguments: Any) -> T:
    """Returns the function's result; bad input ends Snakemake with one sentence and exit code 2."""
    try:
        return function(*arguments)
    except ColdpressError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def start(workflow: Any, root: Path) -> None:
    """Makes this process and its jobs use the compiler of the Snakefile's checkout, and records the user's folder.

    Args:
        workflow: Snakemake's workflow object.
        root: Folder of the imported coldpress.
    """
    checkout = str(workflow.basedir)
    if root != Path(checkout).resolve():
        # an editable install wins over PYTHONPATH, so its stages would silently run instead of these
        sys.exit(f"error: {sys.executable} runs the coldpress of {root}; run make env in {checkout}")
    os.environ["COLDPRESS_CHECKOUT"] = checkout  # for profiles/kubernetes
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    if not is_users(workflow):
        os.chdir(os.environ.get(CALLED_FROM, os.curdir))
    os.environ[CALLED_FROM] = os.getcwd()


def is_users(workflow: Any) -> bool:
    """Tells whether the user started this Snakemake, rather than a job."""
    return workflow.exec_mode == ExecMode.DEFAULT


def all_jobs_run_here(workflow: Any) -> bool:
    """Tells whether every job of the build runs on this machine."""
    return is_users(workflow) and not workflow.remote_exec


def work_in(workflow: Any, folder: Path, target: str) -> None:
    """Makes the folder of the model's builds the working directory, in spite of --directory; holds its lock during the
    whole run of Snakemake, and limits concurrent jobs to the memory of this machine.

    Args:
        workflow: Snakemake's workflow object.
        folder: Folder of the model's builds.
        target: Device and label of this build.

    Raises:
        ColdpressError: if the folder cannot be made, or Snakemake has no metadata for the results in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for link in (folder / target / MANIFEST_FILE, folder / target / "package" / MANIFEST_FILE):
            if link.is_symlink() and not link.exists():  # the artifact was deleted; a dangling link crashes Snakemake
                link.unlink()
        has_results = any(folder.glob("*.json")) or any(folder.glob("*/*.json"))
        if is_users(workflow) and has_results and not (folder / OWN_FOLDER).exists():
            raise ColdpressError(
                f"nothing says what made the results in {folder}: {OWN_FOLDER} is missing there; copy it from where "
                "they were made, or remove the folder to make all of them again"
            )
        workflow.workdir(folder) if workflow.overwrite_workdir is None else os.chdir(folder)
        if is_users(workflow):
            print(f"{FOLDER}{folder}", file=sys.stderr)
    except OSError as error:
        raise ColdpressError(f"cannot build in {folder}: {error.strerror}; name another build_dir") from error
    workflow.execute = _locked(workflow, folder, workflow.execute)
    if all_jobs_run_here(workflow) and workflow.global_resources.get("mem_mb") is None:
        workflow.register_resource("mem_mb", host.free_dram_bytes() // 10**6)


def _locked(workflow: Any, folder: Path, execute: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Snakemake's run, which plans and executes, in the lock of the build; a dry run needs none.

    `onstart` would be too late: Snakemake plans before it, and a run with nothing to do does not call it.
    """

    def run(*, executor_plugin: Any, **others: Any) -> Any:
        if not is_users(workflow) or executor_plugin.common_settings.dryrun_exec:
            return execute(executor_plugin=executor_plugin, **others)
        with ExitStack() as held:
            checked(held.enter_context, build_lock(folder))
            return execute(executor_plugin=executor_plugin, **others)

    return run


def inputs_of(rules: Any, targets: Sequence[str]) -> Inputs:
    """Returns stage -> record parameter -> the stage that writes the record, for all stages that the targets need.

    A record is named after its stage: <stage>.json, or <stage>/<chunk>.json.
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
    """Returns the stage that writes a record; None for shards, which their own stage joins."""
    path = Path(file)
    return next((name for name in (path.stem, path.parent.name) if name in (*STAGES, "device")), None)


class LastWords:
    """Prints the last lines of a build: its summary, or why it failed."""

    def __init__(self, workflow: Any, folder: Path, artifact: Path) -> None:
        """Starts listening to Snakemake.

        Args:
            workflow: Snakemake's workflow object.
            folder: Build folder of a device.
            artifact: Final name of the artifact.
        """
        self._workflow, self._folder, self._artifact = workflow, folder, artifact
        self._before: dict[Path, Mark] = {}
        self._published = _time_of(folder / "publish.json") if artifact.exists() else None
        self._ending = Ending(workflow, folder, checked)

    def begin(self) -> None:
        """Marks the logs before jobs start."""
        self._before = marks(self._logs())

    def built(self) -> None:
        """Arranges for the summary after all jobs are done."""
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
        """Returns log -> rule for the unfinished jobs."""
        jobs = self._workflow.dag.needrun_jobs()
        return {Path(path).absolute(): job.rule.name for job in jobs for path in job.log}


def _time_of(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
