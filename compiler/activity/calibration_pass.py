"""The pass over calibration text that calibrate and recalibrate share, and its settings. Decides device, arithmetic and
part of the text; compiler/activity/statistics.py does the counting."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from coldpress.compiler.activity.expert_counts import curve_of
from coldpress.compiler.activity.forward import ComputeDtype, LayerStream, choose_device, choose_dtype
from coldpress.compiler.activity.layer_counts import ActivityRule, leaders
from coldpress.compiler.activity.shards import shard_text, task_tokens
from coldpress.compiler.activity.statistics import collect
from coldpress.compiler.io import Workspace
from coldpress.compiler.shared_settings import DeviceSetting
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import Count, PositiveCount
from coldpress.schemas.config import Key
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.families import FamilyName
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build


class ComputeConfig(DeviceSetting):
    """Device and arithmetic of passes through the model."""

    compute_dtype: Annotated[Literal["auto", "float32", "bfloat16"], Key()] = Field(
        default="auto",
        description="what passes compute in; auto is bfloat16 where weights have no more digits, as in a quantized "
        "GGUF, and the processor multiplies it; float32 for figures that no rounding changes",
    )


class PassConfig(ComputeConfig):
    """Settings of one pass over the text."""

    shard: Count = Field(default=0, description="which part of the calibration blocks to run")
    num_shards: PositiveCount = Field(default=1, description="parts that the calibration blocks are cut into")


def pass_needs(
    stage: str, build: "Build", families: tuple[FamilyName, ...], with_bits: Iterable[FamilyName]
) -> StageNeeds:
    """Returns the needs of a pass over the text that records the bits of the families `with_bits`."""
    spec = build.model.spec
    bits = [family for family in leaders(families, spec) if family in with_bits]
    running = build.running_bytes(6, 8)
    counts = build.layer_units(bits) * build.num_tokens // 4 + 3 * build.squares_bytes
    ram_bytes = build.TORCH_BYTES + build.layer_weights_bytes + running + counts
    return StageNeeds(stage=stage, ram_bytes=ram_bytes, disk_bytes=build.statistics_bytes(bits))


def stream_of(config: ComputeConfig, model: Model, threads: int) -> tuple[LayerStream, ComputeDtype]:
    """Returns the model ready to run, and its arithmetic; raises ColdpressError if there is no such device."""
    device = choose_device(config.compute_device)
    dtype = choose_dtype(model, device) if config.compute_dtype == "auto" else config.compute_dtype
    return LayerStream(model, threads, device, dtype=dtype), dtype


def count_activity(
    config: PassConfig,
    model: Model,
    corpus: Corpus,
    families: tuple[FamilyName, ...],
    activity: ActivityRule,
    work: Workspace,
    threads: int,
) -> Activations:
    """Counts every layer on the shard's calibration blocks; raises ColdpressError without such a device or shard."""
    first_block, text = shard_text(corpus, config.shard, config.num_shards)
    stream, dtype = stream_of(config, model, threads)
    layers = collect(stream, text, families, activity, work)
    return Activations(
        num_tokens=text.tokens.size,
        block_tokens=text.tokens.shape[1],
        first_block=first_block,
        exact_zeros=activity.choice is None and bool(activity.exact),
        compute_dtype=dtype,
        tasks=task_tokens(corpus, text),
        weights_sha256=model.weights_sha256,
        layers=layers,
        experts=curve_of(layers, text.tokens.size, text.tokens.shape[1]),
    )
