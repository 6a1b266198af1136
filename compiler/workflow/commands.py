"""Builds the command lines, params and resources of stages' rules.

A command is a stage, its settings, and its rule's named inputs as flags of the same names. The memory and time of jobs
are counted from the model's shape (compiler/needs.py, compiler/stage_seconds.py), which `ingest` records. Until then
Snakemake shows <TBD> for later stages; it asks again before it starts a job.
"""

import errno
import functools
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coldpress.compiler.code_digest import stage_digest
from coldpress.compiler.io import load_record
from coldpress.compiler.job import parameters_of
from coldpress.compiler.needs import Build, Inputs, asked_text, needs_of
from coldpress.compiler.stage_seconds import DOWNLOAD_S, limit_s, runtime_s
from coldpress.compiler.stages.ingest import INGEST_BYTES
from coldpress.compiler.stages.preflight.trial import compiled
from coldpress.compiler.workflow.settings import BuildConfig, flags, of_all_stages
from coldpress.runtime.cli.command_line import flag
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model

ARRAYS = "arrays"
"""Name of the input, and of the output, that is no record: folders of array files."""
Parameter = Callable[[Any], str]
"""A function of the wildcards, for a rule's `params`."""
Records = Callable[[str], Path]
"""Stage -> the place of its record on this machine, which an object store may have a copy of."""


def job(stage: str, more: str = "") -> str:
    """Returns the shell command of a stage's rule, for Snakemake to fill in; `more` are flags for paths that are not
    records. The rule has the `params` of its stage."""
    taken = parameters_of(stage)
    words = [
        "OMP_NUM_THREADS={threads} {sys.executable:q} -m coldpress.compiler",
        stage,
        "{params.settings} {params.records} --code {params.code} --build {FOLDER:q} --output {output[0]:q}",
        *(["--layers {params.layers}"] if "layers" in taken else []),
        *(["--threads {threads}"] if "threads" in taken else []),
        *([more] if more else []),
        "2> {log:q}",
    ]
    return " ".join(words)


def params(config: BuildConfig, stage: str, **facts: Any) -> dict[str, Any]:
    """Returns the params of a stage's rule, by name. A changed digest of its code, or a changed text of its settings,
    reruns it. A fact replaces the setting of its name; None leaves it out, for a path that is in the rule's command.
    The settings are a function, because Snakemake would take braces in a plain text for wildcards."""
    text = flags(config, stage, **facts)
    found = {"code": code(config, stage), "settings": lambda wildcards: text, "records": records}
    return found | ({"layers": layers} if "layers" in parameters_of(stage) else {})


def records(wildcards: Any, input: Any) -> str:
    """Returns a rule's records as flags; leaves out records that this build does not have."""
    return " ".join(f"{flag(name)} {shlex.join(files)}" for name, files in named_records(input).items())


def named_records(input: Any) -> dict[str, list[str]]:
    """Returns parameter -> files of a rule's named inputs that this build has, without folders of array files."""
    named = {name: [files] if isinstance(files, str) else list(files) for name, files in input.items()}
    return {name: files for name, files in named.items() if files and name != ARRAYS}


def layers(wildcards: Any) -> list[int]:
    """Returns the layer numbers of a chunk such as 004-007."""
    first, last = map(int, wildcards.chunk.split("-"))
    return list(range(first, last + 1))


def code(config: BuildConfig, module: str) -> str:
    """Returns the digest of the code that decides a stage's result in this build: a changed digest reruns its rule."""
    return _digest(module, tuple(config.plugins().items()))


@functools.cache
def _digest(module: str, plugins: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    return stage_digest(module, dict(plugins))


def shard(config: BuildConfig, stage: str) -> Parameter:
    text, count = flags(config, stage), config["calibration_shards"]
    return lambda wildcards: f"{text} --shard {wildcards.shard} --num-shards {count}"


def resources(
    config: BuildConfig, stage: str, inputs: Callable[[], Inputs], record: Records
) -> dict[str, Callable[..., int]]:
    """Returns Snakemake's functions for the resources of a stage's jobs: the memory `mem_mb`, in MB of 10**6 bytes, and
    the most time `runtime`, in minutes, which grows with every attempt. They ask for `inputs` once all rules are
    known."""

    def mem_mb(wildcards: Any, input: Sequence[str], threads: int) -> int:
        build = _build(config, stage, inputs, record, input, threads)
        try:
            ram_bytes = needs_of(stage, build).ram_bytes if build else INGEST_BYTES
        except ColdpressError:  # settings that do not suit the model: `preflight` runs first and refuses them
            ram_bytes = Build.TORCH_BYTES
        return math.ceil(ram_bytes / 10**6)

    def runtime(wildcards: Any, input: Sequence[str], threads: int, attempt: int) -> int:
        build = _build(config, stage, inputs, record, input, threads)
        return attempt * math.ceil(limit_s(runtime_s(stage, build) if build else DOWNLOAD_S) / 60)

    return {"mem_mb": mem_mb, "runtime": runtime}


def _build(
    config: BuildConfig, stage: str, inputs: Callable[[], Inputs], record: Records, files: Sequence[str], threads: int
) -> Build | None:
    """Returns the facts that a stage's needs are counted from; none for `ingest`, before which no shape is known."""
    if stage == "ingest":
        return None
    ingested = record("ingest")
    if not ingested.exists():
        raise FileNotFoundError(errno.ENOENT, "the model's shape is not known yet", *files[:1])
    settings = of_all_stages(config)
    model = compiled(_loaded(ingested, Model, ingested.stat().st_mtime_ns), settings)
    tokens, block_tokens = _text_of(record("tokenize")) or asked_text(settings, model)
    shards = config["calibration_shards"]
    return Build(model, settings, inputs(), config.device, tokens, block_tokens, threads, shards)


def _text_of(record: Path) -> tuple[int, int] | None:
    """Returns (tokens, tokens per block) of the calibration text, once it exists."""
    if not record.exists():
        return None
    blocks = _loaded(record, Corpus, record.stat().st_mtime_ns).split("calibration")
    return blocks.num_blocks * blocks.block_tokens, blocks.block_tokens


@functools.cache
def _loaded(record: Path, kind: Any, written_ns: int) -> Any:
    """Loads a record; reads it again only after it was rewritten."""
    return load_record(record, kind)
