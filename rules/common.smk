# Paths, settings as flags and the code hash: the configuration is checked in compiler/workflow/settings.py.

import json
import os
import sys
import time
from base64 import urlsafe_b64encode
from contextlib import ExitStack
from pathlib import Path

# The compiler of this checkout, here and in the jobs, whether or not it is installed.
sys.path.insert(0, workflow.basedir)
os.environ["COLDPRESS_CHECKOUT"] = workflow.basedir  # for profiles/kubernetes
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [workflow.basedir, os.environ.get("PYTHONPATH")]))

from snakemake_interface_executor_plugins.settings import ExecMode

from coldpress.compiler.code_digest import stage_digest
from coldpress.compiler.lock import build_lock
from coldpress.compiler.workflow import inputs, settings
from coldpress.compiler.workflow.download import check_before_download
from coldpress.compiler.workflow.ending import Ending
from coldpress.compiler.workflow.last_words import last_words, marks
from coldpress.runtime import plugins
from coldpress.schemas.errors import ColdpressError


def checked(function, *arguments):
    """The function's result; bad input ends snakemake with one sentence and exit code 2."""
    try:
        return function(*arguments)
    except ColdpressError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if settings.ROOT != Path(workflow.basedir).resolve():
    # an editable install wins over PYTHONPATH, and its stages would run unseen instead of these
    sys.exit(f"error: {sys.executable} runs the coldpress of {settings.ROOT}; run make env in {workflow.basedir}")


def enter(folder):
    """Makes the folder of the model's builds the working directory, in spite of --directory, where it is called from."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        workflow.workdir(folder) if workflow.overwrite_workdir is None else os.chdir(folder)
    except OSError as error:
        raise ColdpressError(f"cannot build in {folder}: {error.strerror}; name another build_dir") from error


STARTED_S = time.time()
# A job's snakemake may be started by another one, which works in the build folder already, as on Slurm.
if workflow.exec_mode != ExecMode.DEFAULT:
    os.chdir(os.environ.get("COLDPRESS_CALLED_FROM", os.curdir))
os.environ["COLDPRESS_CALLED_FROM"] = os.getcwd()
CONFIG = checked(settings.resolve, config)
FOLDER = CONFIG.folder

# Snakemake works in the folder of the model's builds: what it knows of them (settings and code that results were made
# with, digests of inputs, what was cut short) is in .snakemake there, and says the same wherever it is called from.
checked(enter, FOLDER)

DEVICE = CONFIG.target
ARTIFACT = f"{FOLDER}/{DEVICE}/{CONFIG.model.name}-{CONFIG.target}.coldpress"
# Where `package` writes the artifact, and `publish` takes it from.
UNPUBLISHED = f"{FOLDER}/{DEVICE}/package/artifact"
# What a stage `export` of this build or an earlier one, which may have had another format, leaves beside it.
EXPORTS = f"{FOLDER}/{DEVICE}/{CONFIG.model.name}-{CONFIG.target}."
EXPORTED = json.dumps(
    [f"{FOLDER}/{DEVICE}/export.json", *(EXPORTS + name for name in plugins.names("coldpress.compiler.stages.export"))],
    ensure_ascii=False,
)
STANDS = os.path.isfile(f"{ARTIFACT}/manifest.json")
# An artifact is no output of its rule (rules/publish.smk), so snakemake would not miss one that somebody deleted. As
# long as none stands, its rules also owe a file whose name is of this run alone, so that nothing left over passes for
# it. Both run in this process, where that name is known.
DUE = f"{DEVICE}/.{{stage}}.{time.time_ns()}.due"
PUBLISH_DUE = [] if STANDS else [DUE.format(stage="publish")]
PACKAGE_DUE = [] if STANDS or os.path.isfile(f"{UNPUBLISHED}/manifest.json") else [DUE.format(stage="package")]
# The model that is calibrated: the checkpoint, or what it is with another activation.
DENSE = "ingest.json" if CONFIG["relufy"] == "off" else "relufy.json"
# The model that is compiled: that one, or what distillation made of it.
SOURCE = f"{DEVICE}/distill.json" if CONFIG["distill"] else DENSE
CHUNKS = settings.chunks(CONFIG)
# Layer-wise jobs that may share a machine's memory; where they are sent to a cluster, each has its own share of it.
AT_A_TIME = 1 if workflow.remote_exec else len(CHUNKS)
PLUGINS = CONFIG.plugins()


wildcard_constraints:
    chunk=r"\d{3}-\d{3}",
    shard=r"\d+",


def job(stage):
    """The beginning of a stage's command line; its rule has `code` and `settings` among its params."""
    return (
        "OMP_NUM_THREADS={threads} {sys.executable:q} -m coldpress.compiler "
        + stage
        + " {params.settings} --code {params.code}"
        " --build {FOLDER:q} --output {output[0]:q}"
    )


def code(module):
    """The digest of what decides a stage's result in this build: a changed one reruns its rule."""
    return stage_digest(module, PLUGINS)


def flags(stage, **facts):
    """The settings of a stage as flags, and facts that no user gives: a changed one reruns its rule."""
    text = settings.flags(CONFIG, stage, **facts)
    return lambda wildcards: text  # in a mere text, snakemake would take what stands in braces for a wildcard


def stamps(*files):
    """Files that cannot be inputs because of their names: a changed one reruns the rule all the same."""
    return inputs.stamps(CONFIG, list(files))


def layers(wildcards):
    """The layer numbers of a chunk such as 004-007."""
    first, last = map(int, wildcards.chunk.split("-"))
    return list(range(first, last + 1))


def per_chunk(stage):
    """The records of a layer-wise stage, in the order of layers."""
    return expand(f"{DEVICE}/{stage}/{{chunk}}.json", chunk=CHUNKS)


def shards_in(folder, stage):
    """The records of a stage's shards, which it puts together; none where one job does it all."""
    count = CONFIG["calibration_shards"]
    return expand(os.path.join(folder, f"{stage}-shards", "{shard}.json"), shard=range(count)) if count > 1 else []


# Flags of what a build may do without.
PREDICTORS = [f"{DEVICE}/size.json"] if settings.needs_predictors(CONFIG) else []
PREDICTORS_FLAG = " --predictors {input.predictors:q}" if PREDICTORS else ""
GRAM = [f"{DEVICE}/gram.json"] if settings.needs_gram(CONFIG) else []
GRAM_FLAG = " --gram {input.gram:q}" if GRAM else ""
IMPORTANCE = [f"{DEVICE}/importance.json"] if CONFIG["imatrix"] else []
IMPORTANCE_FLAG = " --importance {input.importance:q}" if IMPORTANCE else ""
EXPORT = [f"{DEVICE}/export.json"] if CONFIG["export"] else []
SHARDS_FLAG = " --shards {input.shards:q}" if CONFIG["calibration_shards"] > 1 else ""


# Snakemake takes results of which it knows nothing for good ones, as those of a folder copied without its .snakemake.
RECORD_OF_INGEST = FOLDER / ".snakemake" / "metadata" / urlsafe_b64encode(b"ingest.json").decode()


def locked(execute):
    """Snakemake's own run, which plans and executes, under the lock of the build; a dry run needs none."""

    def run(*, executor_plugin, **others):
        if workflow.exec_mode == ExecMode.DEFAULT and not RECORD_OF_INGEST.exists() and Path("ingest.json").exists():
            print(f"note: no record says what made the results in {FOLDER}: all are made again", file=sys.stderr)
            workflow.dag_settings.forceall = True
        if workflow.exec_mode != ExecMode.DEFAULT or executor_plugin.common_settings.dryrun_exec:
            return execute(executor_plugin=executor_plugin, **others)
        with ExitStack() as held:
            checked(held.enter_context, build_lock(FOLDER))
            return execute(executor_plugin=executor_plugin, **others)

    return run


# A hook would be too late: what is to be done is decided before `onstart`, which a build with nothing to do has not.
workflow.execute = locked(workflow.execute)


def logs_of_jobs():
    """Log -> rule, of the jobs that are not finished."""
    return {Path(path).absolute(): job.rule.name for job in workflow.dag.needrun_jobs() for path in job.log}


def forget_due():
    for path in (*PACKAGE_DUE, *PUBLISH_DUE):
        Path(path).unlink(missing_ok=True)


LOGS_BEFORE = {}


# What the build gave is said last, also by a run that finds nothing to do.
ENDING = Ending(workflow, FOLDER / DEVICE, checked)


onstart:
    LOGS_BEFORE.update(marks(logs_of_jobs()))
    announced = checked(
        check_before_download, CONFIG, FOLDER, AT_A_TIME, None if workflow.remote_exec else workflow.cores
    )
    if announced:
        print(announced, file=sys.stderr)


onsuccess:
    forget_due()
    ENDING.built()


onerror:
    forget_due()
    record = Path(f"{DEVICE}/publish.json")
    if record.exists() and record.stat().st_mtime < STARTED_S and STANDS:
        shown = os.path.relpath(ARTIFACT, workflow.workdir_init)
        print(f"note: {shown} is of an earlier build and was left as it is, with its report", file=sys.stderr)
    sentence, code = last_words(logs_of_jobs(), LOGS_BEFORE)
    print(sentence, file=sys.stderr, flush=True)
    sys.exit(code)
