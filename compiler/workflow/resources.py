"""Tells Snakemake the memory and time of jobs, from the counts of their stages (compiler/needs.py).

The counts need the model's shape, which `ingest` records. Until then Snakemake shows <TBD> for later stages; it asks
again before it starts a job. `ingest` itself counts from the files that it reads.
"""

import errno
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coldpress.compiler.io import load_record
from coldpress.compiler.needs import Build, Inputs, limit_s, needs_of
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.preflight import asked_text
from coldpress.compiler.stages.preflight.trial import compiled
from coldpress.compiler.workflow.settings import BuildConfig, of_all_stages
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds

Records = Callable[[str], Path]
"""Stage -> the place of its record on this machine, which an object store may have a copy of."""


def of_stage(
    config: BuildConfig, stage: str, inputs: Callable[[], Inputs], record: Records
) -> dict[str, Callable[..., int]]:
    """Returns Snakemake's functions for the resources of a stage's jobs: the memory `mem_mb`, in MB of 10**6 bytes, and
    the most time `runtime`, in minutes, which grows with every attempt. They ask for `inputs` once all rules are
    known."""

    def mem_mb(wildcards: Any, input: Sequence[str], threads: int) -> int:
        return math.ceil(_needs(config, stage, inputs, record, input, threads).ram_bytes / 10**6)

    def runtime(wildcards: Any, input: Sequence[str], threads: int, attempt: int) -> int:
        return attempt * math.ceil(limit_s(_needs(config, stage, inputs, record, input, threads)) / 60)

    return {"mem_mb": mem_mb, "runtime": runtime}


def _needs(
    config: BuildConfig,
    stage: str,
    inputs: Callable[[], Inputs],
    record: Records,
    files: Sequence[str],
    threads: int,
) -> StageNeeds:
    if stage == "ingest":
        return ingest.needs_for(sum(Path(file).stat().st_size for file in files))
    ingested = record("ingest")
    if not ingested.exists():
        raise FileNotFoundError(errno.ENOENT, "the model's shape is not known yet", *files[:1])
    settings = of_all_stages(config)
    model = compiled(_loaded(ingested, Model, ingested.stat().st_mtime_ns), settings)
    tokens, block_tokens = _text(record("tokenize")) or asked_text(settings, model)
    shared = (config["calibration_shards"], config["layers_per_job"])
    build = Build(model, settings, inputs(), config.device, tokens, block_tokens, threads, *shared)
    try:
        return needs_of(stage, build)
    except ColdpressError:  # settings that do not suit the model: `preflight` runs first and refuses them
        return StageNeeds(stage=stage, ram_bytes=Build.TORCH_BYTES, disk_bytes=0, runtime_s=0)


def _text(record: Path) -> tuple[int, int] | None:
    """Returns (tokens, tokens per block) of the calibration text, once it exists."""
    if not record.exists():
        return None
    blocks = _loaded(record, Corpus, record.stat().st_mtime_ns).split("calibration")
    return blocks.num_blocks * blocks.block_tokens, blocks.block_tokens


@functools.cache
def _loaded(record: Path, kind: Any, written_ns: int) -> Any:
    """Loads a record; reads it again only after it was rewritten."""
    return load_record(record, kind)
