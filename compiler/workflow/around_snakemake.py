"""Does what the workflow needs of Snakemake beyond its documented interface; tests hold it to the pinned version.

`workflow` is used for this:

- `is_main_process`: each job on a cluster has a Snakemake that reads the Snakefile again, and takes no lock.
- `execute` is wrapped: nothing documented runs before Snakemake plans, and `onstart` does not run if nothing is to do.
- `execute` is told the executor, and `executor_plugin` holds it afterwards: dry runs take no lock, and this machine's
  memory limits only jobs that run here. The Snakefile is read before the executor is known.
- `global_resources`, `register_resource`: that limit, unless the user gave one. `--resources` is the documented way,
  but a profile cannot ask how much memory is free.
- `enable_cache` says whether --cache was given: without it, `cache: True` would print a warning for each rule.
- `rule._benchmark` is emptied where a cache may have the result: Snakemake refuses a rule with both directives, and no
  directive can be left out by a condition.
- `storage_settings` has the object store and the folder in it.
- `storage_registry` asks that store whether results are there that another folder made, and for single records; a
  failed job's log is fetched by its `storage_object`.
- The S3 plug-in (0.3.6) keeps its first answer to whether an object is a folder, so that one which a job on another
  machine makes afterwards stays missing; `is_dir` is replaced by a function that asks each time.
- `Job.format_wildcards` is wrapped: it prints the command of a module's rule with the main file's variables.
- `workdir` is the function of that directive: the directive would end in a traceback where a folder cannot be made.
What `compiler/workflow/ending.py` takes and listens to is listed there.
"""

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from snakemake.jobs import Job

from coldpress.compiler.device import memory
from coldpress.compiler.lock import build_locks
from coldpress.compiler.needs import Inputs
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.workflow.commands import named_records
from coldpress.compiler.workflow.last_words import NOTE, REFUSED, no_room
from coldpress.compiler.workflow.pins import keep
from coldpress.compiler.workflow.progress import FOLDER
from coldpress.compiler.workflow.settings import BuildConfig
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.manifest import MANIFEST_FILE

CALLED_FROM = "COLDPRESS_CALLED_FROM"
"""Environment variable with the folder where the user is: a job's snakemake starts in the build folder."""
OWN_FOLDER = ".snakemake"
STORES = ".stores"
"""File in a build folder that names the object stores whose results it made."""
S3 = "s3"
ASKED_AGAIN_S = 10
"""Seconds after which an object store is asked again for a record."""
T = TypeVar("T")
_FORMAT_WILDCARDS = Job.format_wildcards


def checked(function: Callable[..., T], *arguments: Any) -> T:
    """Returns the function's result; bad input ends Snakemake with one sentence and exit code 2."""
    try:
        return function(*arguments)
    except ColdpressError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def start(workflow: Any, root: Path) -> None:
    """Makes this process and its jobs use the compiler of the Snakefile's checkout, and records the user's folder;
    `root` is the folder of the imported coldpress."""
    checkout = str(workflow.basedir)
    if root != Path(checkout).resolve():
        # an editable install wins over PYTHONPATH, so its stages would silently run instead of these
        sys.exit(f"error: {sys.executable} runs the coldpress of {root}; run make env in {checkout}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    if not workflow.is_main_process:
        os.chdir(os.environ.get(CALLED_FROM, os.curdir))
    os.environ[CALLED_FROM] = os.getcwd()
    Job.format_wildcards = _format_wildcards  # type: ignore[method-assign]


def _format_wildcards(job: Any, string: str, **variables: Any) -> str:
    """Formats a rule's command with the constants of its module, as Snakemake does where it runs it."""
    constants = {name: value for name, value in job.rule.module_globals.items() if name.isupper()}
    return _FORMAT_WILDCARDS(job, string, **constants | variables)


def threads_here(workflow: Any) -> int | None:
    """Returns the cores that jobs share on this machine, once Snakemake runs; None if jobs run on others."""
    return workflow.cores if workflow.executor_plugin.common_settings.local_exec else None


def work_in(workflow: Any, builds: Sequence[BuildConfig]) -> None:
    """Makes the one folder of all builds the working directory, in spite of --directory; holds the locks of their
    models during the whole run of Snakemake, and limits jobs that run here at the same time to the memory of this
    machine. Raises ColdpressError if a folder cannot be made, or nothing is known of the results in it."""
    folder = builds[0].workdir
    try:
        for build in builds:
            build.folder.mkdir(parents=True, exist_ok=True)
            for link in (build.target_folder / MANIFEST_FILE, build.target_folder / "package" / MANIFEST_FILE):
                if link.is_symlink() and not link.exists():
                    link.unlink()  # of a deleted artifact: it would crash Snakemake
            results = chain(build.folder.glob("*.json"), build.folder.glob("*/*.json"))
            if workflow.is_main_process and any(results) and not _known(build.folder).exists():
                raise ColdpressError(
                    f"nothing says what made the results in {build.folder}: {_known(build.folder)} is missing; copy "
                    f"{folder / OWN_FOLDER} from where they were made, or remove the folder to make all of them again"
                )
        workflow.workdir(folder)  # with --directory it does nothing
        os.chdir(folder)
        if workflow.is_main_process:
            print(f"{FOLDER}{folder}", file=sys.stderr)
    except OSError as error:
        raise ColdpressError(f"cannot build in {folder}: {error.strerror}; name another build_dir") from error
    if workflow.is_main_process:
        workflow.execute = _limited(workflow, builds, workflow.execute)


def _known(folder: Path) -> Path:
    """Returns the file that says that Snakemake's metadata has the results of a model's builds."""
    return folder.parent / OWN_FOLDER / "models" / folder.name


def _limited(workflow: Any, builds: Sequence[BuildConfig], execute: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Snakemake's run in the models' locks, except for a dry run, and in this machine's limit on memory."""

    def run(*, executor_plugin: Any, **others: Any) -> Any:
        settings = executor_plugin.common_settings
        if settings.local_exec and workflow.global_resources.get("mem_mb") is None:
            workflow.register_resource("mem_mb", memory.free_dram_bytes() // 10**6)
        with ExitStack() as held:
            held.enter_context(_room(builds[0].folder))
            if not settings.dryrun_exec:
                folders = sorted({build.folder for build in builds})
                checked(held.enter_context, build_locks(folders))
                for folder in folders:
                    checked(_claim, workflow, folder)
                for build in builds:
                    for line in checked(keep, build.folder, build.pins):
                        print(f"{NOTE}{line}", file=sys.stderr)
            return execute(executor_plugin=executor_plugin, **others)

    return run


@contextmanager
def _room(folder: Path) -> Iterator[None]:
    """Ends Snakemake with one sentence if it fails within the block because the disk of `folder` is full."""
    try:
        yield
    except Exception:
        if sentence := no_room(folder):
            print(sentence, file=sys.stderr)
            sys.exit(REFUSED)
        raise


def _claim(workflow: Any, folder: Path) -> None:
    """Notes that this run makes the results of a model: here, and in the object store, if there is one. Raises
    ColdpressError if another folder has made results there: what is known of them, and the lock, are in that one."""
    _known(folder).parent.mkdir(parents=True, exist_ok=True)
    _known(folder).touch()
    if workflow.storage_settings.default_storage_provider is None:
        return
    prefix, provider = f"{workflow.storage_settings.default_storage_prefix}/{folder.name}", workflow.storage_registry
    noted = folder / STORES
    known = noted.read_text(encoding="utf-8").splitlines() if noted.exists() else []
    if prefix in known:
        return
    try:
        found = provider.default_storage_provider.object(f"{prefix}/ingest.json").exists()
    except Exception as error:
        raise ColdpressError(f"cannot look into {prefix}: {error}; see to the store's address and keys") from error
    if found:
        raise ColdpressError(
            f"the results in {prefix} were made from another folder than {folder}, and only there is known what made "
            "them; build from there, name another --default-storage-prefix, or remove them"
        )
    noted.write_text("\n".join((*known, prefix, "")), encoding="utf-8")


def stores(workflow: Any) -> bool:
    settings = workflow.storage_settings
    if settings is None or settings.default_storage_provider is None:
        return False
    settings.default_storage_prefix = (settings.default_storage_prefix or "").rstrip("/")
    if settings.default_storage_provider == S3:
        kind = importlib.import_module(f"snakemake_storage_plugin_{S3}").StorageObject
        kind.is_dir = lambda found: any(found.get_subkeys())
    return True


def record_here(workflow: Any, folder: Path, stage: str) -> Path:
    """Returns the place of a stage's record on this machine; fetches it where an object store has it, since Snakemake
    deletes its own copy when no job on this machine needs it any more."""
    settings, file = workflow.storage_settings, f"{stage}.json"
    if settings is None or settings.default_storage_provider is None:
        return folder / file
    path = folder.parent / OWN_FOLDER / "records" / folder.name / file
    provider = workflow.storage_registry.default_storage_provider
    query = f"{settings.default_storage_prefix}/{folder.name}/{file}"
    with suppress(FileNotFoundError):
        _fetch(provider, query, path, int(time.monotonic() / ASKED_AGAIN_S))
    return path


@functools.lru_cache(maxsize=8)
def _fetch(provider: Any, query: str, path: Path, asked: int) -> None:
    """Puts an object of the store at `path`; once it was there, asks only once for each `asked`. Raises
    FileNotFoundError if it is not in the store; then there is no file at `path` either."""
    found = provider.object(query)
    found.set_local_path(path)
    path.unlink(missing_ok=True)
    if not found.exists():
        raise FileNotFoundError(query)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.retrieve_object()


def time_no_shared_rule(workflow: Any) -> None:
    """Empties `benchmark` of each rule whose result may come from a cache; call it after all rules are read."""
    for rule in workflow.rules:
        if rule.cache and rule.cache.output:
            rule._benchmark = None


OF_DRAFT_MODELS = ("drafter", "draft_package")
"""Record parameters that follow from another build, which no trial has."""


def inputs_of(rules: Any, targets: Sequence[str]) -> Inputs:
    """Returns stage -> record parameter -> the stage that writes the record, for all stages that the targets need. A
    record is named after its stage: <stage>.json, or <stage>/<chunk>.json."""
    found: dict[str, dict[str, str]] = {}
    pending = [*targets]
    while pending:
        stage = pending.pop()
        if stage in found or stage not in STAGES:
            continue
        named = named_records(getattr(rules, stage).input)
        writers = {name: _writer(files[0]) for name, files in named.items() if name not in OF_DRAFT_MODELS}
        found[stage] = {name: writer for name, writer in writers.items() if writer is not None}
        pending += found[stage].values()
    return {stage: found[stage] for stage in STAGES if stage in found}


def _writer(file: str) -> str | None:
    """Returns the stage that writes a record; None for shards, which their own stage joins."""
    path = Path(file)
    return next((name for name in (path.stem, path.parent.name) if name in (*STAGES, "device")), None)
