"""Does what the workflow needs of Snakemake beyond its documented interface; tests hold it to the pinned version.

Rules alone cannot do four things. Snakemake works in the folder of the model's builds, wherever it is called from, so
that its metadata lies beside the results. A lock is held from before it plans until it ends. A folder with results but
without metadata is refused. When a build fails, the sentence of the failed job comes last.

Beyond the documented interface, `workflow` is used for this:

- `is_main_process`: each job on a cluster has a Snakemake that reads the Snakefile again, and takes no lock.
- `execute` is wrapped: nothing documented runs before Snakemake plans, and `onstart` does not run if nothing is to do.
- `execute` is told the executor, and `executor_plugin` holds it afterwards: dry runs take no lock, and this machine's
  memory limits only jobs that run here. The Snakefile is read before the executor is known.
- `global_resources`, `register_resource`: that limit, unless the user gave one. `--resources` is the documented way,
  but a profile cannot ask how much memory is free.
- `workdir` is the function of that directive: the directive would end in a traceback where a folder cannot be made.
- `dag.needrun_jobs()`: the logs of the jobs that did not finish; `onerror` is told only Snakemake's own log.

What `compiler/workflow/ending.py` listens to is listed there.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

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
    if not workflow.is_main_process:
        os.chdir(os.environ.get(CALLED_FROM, os.curdir))
    os.environ[CALLED_FROM] = os.getcwd()


def threads_here(workflow: Any) -> int | None:
    """Returns the cores that jobs share on this machine, once Snakemake runs; None if jobs run on others."""
    return workflow.cores if workflow.executor_plugin.common_settings.local_exec else None


def work_in(workflow: Any, folder: Path, target: str) -> None:
    """Makes the folder of the model's builds the working directory, in spite of --directory; holds its lock during the
    whole run of Snakemake, and limits jobs that run here at the same time to the memory of this machine.

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
        if workflow.is_main_process and has_results and not (folder / OWN_FOLDER).exists():
            raise ColdpressError(
                f"nothing says what made the results in {folder}: {OWN_FOLDER} is missing there; copy it from where "
                "they were made, or remove the folder to make all of them again"
            )
        workflow.workdir(folder)  # with --directory it does nothing
        os.chdir(folder)
        if workflow.is_main_process:
            print(f"{FOLDER}{folder}", file=sys.stderr)
    except OSError as error:
        raise ColdpressError(f"cannot build in {folder}: {error.strerror}; name another build_dir") from error
    if workflow.is_main_process:
        workflow.execute = _limited(workflow, folder, workflow.execute)


def _limited(workflow: Any, folder: Path, execute: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Snakemake's run, which plans and executes, in the lock of the build, which a dry run does not need, and in
    the limit on memory, which a cluster has of its own."""

    def run(*, executor_plugin: Any, **others: Any) -> Any:
        settings = executor_plugin.common_settings
        if settings.local_exec and workflow.global_resources.get("mem_mb") is None:
            workflow.register_resource("mem_mb", host.free_dram_bytes() // 10**6)
        with ExitStack() as held:
            if not settings.dryrun_exec:
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
        read = getattr(rules, stage).input.items()
        named = ((name, [files] if isinstance(files, str) else list(files)) for name, files in read)
        writers = {name: _writer(files[0]) for name, files in named if files}
        found[stage] = {name: writer for name, writer in writers.items() if writer is not None}
        pending += found[stage].values()
    return {stage: found[stage] for stage in STAGES if stage in found}


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
        self._ending = Ending(workflow, folder, Path(os.environ[CALLED_FROM]), checked)

    def begin(self) -> None:
        """Marks the logs before jobs start."""
        self._before = marks(self._logs())

    def built(self) -> None:
        """Arranges for the summary after all jobs are done."""
        self._ending.built()

    def failed(self) -> None:
        """Ends the process with the sentence of the job that failed."""
        if self._published is not None and _time_of(self._folder / "publish.json") == self._published:
            shown = os.path.relpath(self._artifact, os.environ[CALLED_FROM])
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
