# Names and paths of one build; paths are relative to the folder of all builds.
# Params and shell commands, as they stand in the rules, are the key by which a cache finds a result. So no param names
# a place of this machine: a path outside the build folder stands in the command, and Snakemake adds the file's content.

import json
import os
import sys

from coldpress.compiler.workflow import around_snakemake, commands, inputs, settings
from coldpress.compiler.workflow.around_snakemake import checked

CONFIG = config["build"]  # resolved in builds.smk
FOLDER = CONFIG.folder
BUILDS = CONFIG.workdir
MODEL = CONFIG.model.name
DEVICE = f"{MODEL}/{CONFIG.target}"
NAME = f"{MODEL}-{CONFIG.target}"
# Records that several stages read.
CORPUS = f"{MODEL}/tokenize.json"
CALIBRATED = f"{MODEL}/calibrate.json"
SPARSITY = f"{DEVICE}/allocate.json"
RECALIBRATED = f"{DEVICE}/recalibrate.json"
PLACEMENT = f"{DEVICE}/place.json"
CACHED = workflow.enable_cache  # with --cache, results of most rules are shared through Snakemake's cache
# With --default-storage-provider, results of rules lie in an object store, and no file system is shared: what reads files
# from outside, or the artifact, which never leaves this machine, runs where Snakemake runs.
STORED = around_snakemake.stores(workflow)
HERE = "true" if workflow.is_main_process else "false"  # where a job's own Snakemake reads this, it runs elsewhere
# The model to calibrate: the checkpoint, or its relufied form.
DENSE = f"{MODEL}/ingest.json" if CONFIG["relufy"] == "off" else f"{MODEL}/relufy.json"
# The model to compile: the same one, or the distilled one.
SOURCE = f"{DEVICE}/distill.json" if CONFIG["distill"] else DENSE
CHUNKS = settings.chunks(CONFIG)
# Optional records of a build.
PREDICTORS = [f"{DEVICE}/size.json"] if settings.needs_predictors(CONFIG) else []
CURVES = [f"{MODEL}/explore.json"] if CONFIG["method"] == "auto" else []
GRAM = [f"{DEVICE}/gram.json"] if settings.needs_gram(CONFIG) else []
# The plans: those whose routing is settled, or exact.
PLANS = f"{DEVICE}/route.json" if settings.needs_routing(CONFIG) else f"{DEVICE}/plan.json"
IMPORTANCE = [f"{DEVICE}/importance.json"] if CONFIG["imatrix"] else []
# The draft model's build: others take only its artifact.
DRAFT = f"{CONFIG.draft.model.name}/{CONFIG.draft.target}" if CONFIG.draft else None
DRAFT_CORPUS = [f"{CONFIG.draft.model.name}/tokenize.json"] if DRAFT else []
DRAFT_PACKAGE = [local(f"{DRAFT}/package.json")] if DRAFT else []
DRAFT_MANIFEST = [local(f"{DRAFT}/package/manifest.json")] if DRAFT else []
DRAFTER = [f"{DEVICE}/draft.json"] if DRAFT else []
EXPORT = [f"{DEVICE}/export.json"] if CONFIG["export"] else []
# Files that this build, or an earlier one with another format, may have exported.
EXPORTED = json.dumps([f"{BUILDS}/{DEVICE}/{name}" for name in ("export.json", *settings.exports(NAME))])


wildcard_constraints:
    chunk=r"\d{3}-\d{3}",
    shard=r"\d+",


def inputs_of_rules():
    """Returns stage -> parameter -> the stage that writes its record, for all stages of this build."""
    return around_snakemake.inputs_of(rules, ["preflight", "publish", "report", *(["export"] if EXPORT else [])])


def record_of(stage):
    """Returns the place on this machine of the record of a stage that every device shares."""
    return around_snakemake.record_here(workflow, FOLDER, stage)


def needs(stage):
    return commands.resources(CONFIG, stage, inputs_of_rules, record_of)


def per_chunk(stage):
    """Returns the records of a layer-wise stage, in the order of layers."""
    return expand(f"{DEVICE}/{stage}/{{chunk}}.json", chunk=CHUNKS)


ORDER = per_chunk("order")


def shards_in(folder, stage):
    """Returns the records of a stage's shards, which the stage joins; none where one job does everything."""
    count = CONFIG["calibration_shards"]
    return expand(os.path.join(folder, f"{stage}-shards", "{shard}.json"), shard=range(count)) if count > 1 else []


# Records that refer to array files of other stages, too: they pass on what they were given.
PASSED_ON = {RECALIBRATED: [CALIBRATED], f"{DEVICE}/size.json": per_chunk("predict")}


def arrays(*records):
    """Returns the folders of array files that a rule opens, from the records that refer to them; lists are joined."""
    named = [name for given in records for name in ([given] if isinstance(given, str) else given)]
    owners = [owner for name in named for owner in (name, *PASSED_ON.get(name, ()))]
    return [owner.removesuffix(".json") for owner in dict.fromkeys(owners) if owner not in PREDICTORS]


TARGETS = [
    f"{DEVICE}/preflight.json",
    local(f"{DEVICE}/manifest.json"),
    local(f"{DEVICE}/metrics.json"),
    local(f"{DEVICE}/report.html"),
    *local(EXPORT),
]
