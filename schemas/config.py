"""The build configuration: what a user may say with `snakemake --config key=value`, checked and resolved."""

from typing import Literal

from pydantic import Field

from schemas.base import PositiveCount, Record
from schemas.families import FormatName, Method

RequestedMethod = Literal["auto", "dense", "relu", "predictor", "topk"]


class BuildConfig(Record):
    """Every key, with the defaults that a model or device profile may replace (compiler/config.py resolves them)."""

    model: str = "demo"
    device: str = "pixel6"
    revision: str | None = None
    """40-hex commit of a hub model, where the model profile pins none."""
    method: Method
    density: float | None = Field(default=None, gt=0, le=1)
    """Share of units used per token; None derives it from the DRAM budget."""
    format: FormatName
    dram_budget: int | str
    """Bytes, or a share of the dense footprint such as `50%`."""
    order: str = "ripple"
    place: str = "pulp_highs"
    cache: str = "lru"
    distill: bool = False
    corpus: str
    calibration_tokens: PositiveCount = 8192
    context_length: PositiveCount
    seed: int = Field(default=0, ge=0)
    layers_per_job: PositiveCount
    build_dir: str = "build"
