# Paths, settings as flags and the code hash: the configuration is checked in compiler/workflow/settings.py.

import os
import sys
import time
from pathlib import Path

# The compiler of this checkout, here and in the jobs, whether or not it is installed.
sys.path.insert(0, workflow.basedir)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [workflow.basedir, os.environ.get("PYTHONPATH")]))

from compiler.workflow import settings
from compiler.workflow.code_digest import stage_digest
from compiler.workflow.download import check_before_download
from compiler.workflow.ending import Ending
from compiler.workflow.lock import hold
from schemas.errors import ColdpressError


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

STARTED_S = time.time()
CONFIG = checked(settings.resolve, config)

MODEL = f"{CONFIG['build_dir']}/{CONFIG.model.name}"
DEVICE = f"{MODEL}/{CONFIG.target}"
ARTIFACT = f"{DEVICE}/{CONFIG.model.name}-{CONFIG.target}.coldpress"
# Where `package` writes the artifact, and `publish` takes it from.
UNPUBLISHED = f"{DEVICE}/package/artifact"
STANDS = os.path.isfile(f"{ARTIFACT}/manifest.json")
# An artifact is no output of its rule (rules/publish.smk), so snakemake would not miss one that somebody deleted. As
# long as none stands, its rules also owe a file whose name is of this run alone, so that nothing left over passes for
# it. Both run in this process, where that name is known.
DUE = f"{DEVICE}/.{{stage}}.{time.time_ns()}.due"
PUBLISH_DUE = [] if STANDS else [DUE.format(stage="publish")]
PACKAGE_DUE = [] if STANDS or os.path.isfile(f"{UNPUBLISHED}/manifest.json") else [DUE.format(stage="package")]
# The model that is compiled: the checkpoint, or what distillation made of it.
SOURCE = f"{DEVICE}/distill.json" if CONFIG["distill"] else f"{MODEL}/ingest.json"
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
        "OMP_NUM_THREADS={threads} {sys.executable} -m compiler " + stage + " {params.settings} --code {params.code}"
        " --output {output[0]:q}"
    )


def code(module):
    """The digest of what decides a stage's result in this build: a changed one reruns its rule."""
    return stage_digest(module, PLUGINS)


def flags(stage, **facts):
    """The settings of a stage as flags, and facts that no user gives: a changed one reruns its rule."""
    return settings.flags(CONFIG, stage, **facts)


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
    return expand(f"{folder}/{stage}-shards/{{shard}}.json", shard=range(count)) if count > 1 else []


# Flags of what a build may do without.
PREDICTORS = per_chunk("predict") if settings.needs_predictors(CONFIG) else []
PREDICTORS_FLAG = " --predictors {input.predictors:q}" if PREDICTORS else ""
GRAM = [f"{DEVICE}/gram.json"] if settings.needs_gram(CONFIG) else []
GRAM_FLAG = " --gram {input.gram:q}" if GRAM else ""
SHARDS_FLAG = " --shards {input.shards:q}" if CONFIG["calibration_shards"] > 1 else ""


onstart:
    LOCK = checked(hold, Path(MODEL))
    announced = checked(
        check_before_download, CONFIG, Path(MODEL), AT_A_TIME, None if workflow.remote_exec else workflow.cores
    )
    if announced:
        print(announced, file=sys.stderr)


def forget_due():
    for path in (*PACKAGE_DUE, *PUBLISH_DUE):
        Path(path).unlink(missing_ok=True)


# What the build gave is said last, also by a run that finds nothing to do.
ENDING = Ending(workflow, Path(DEVICE), checked)


onsuccess:
    forget_due()
    ENDING.built()


onerror:
    forget_due()
    record = Path(f"{DEVICE}/publish.json")
    if record.exists() and record.stat().st_mtime < STARTED_S and STANDS:
        print(f"note: {ARTIFACT} is of an earlier build and was left as it is, with its report", file=sys.stderr)
    # a stage that refused its input ended with code 2, and so does snakemake
    with open(log[0] if isinstance(log, list) else log, encoding="utf-8") as lines:
        if "returned non-zero exit status 2." in lines.read():
            sys.exit(2)
