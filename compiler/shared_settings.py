"""Declares the settings that several stages share, once each; a stage's own record inherits them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from coldpress.schemas.base import Options, PositiveCount, Record, Share
from coldpress.schemas.config import Key, OptionsOf
from coldpress.schemas.families import Method
from coldpress.schemas.layout import DraftName, RoutingName

DEFAULT_CACHE, EXACT_ROUTING = "lfu", "top_k"
MAX_PPL_RATIO = 1.05
"""Perplexity over the source's up to which quality is called kept where nobody says: what the papers call little (DIP
Table 1, ActiveFlow Table 3)."""
OVERPREDICTION = 1.75
"""Most units that predictors name, per active unit, where DRAM allows."""
WHOLE = "whole"
"""The value of `explore` that measures everything."""
PositiveFloat = Annotated[float, Field(gt=0)]
Off = Literal["off"]


class MethodSetting(Record):
    """Settings of stages that depend on how active units are found, before `allocate` has recorded it."""

    method: Annotated[
        Method,
        Key(
            plugins="coldpress.runtime.sparsity",
            auto=True,
            default="`auto`: a search over all, which takes dense unless another is clearly faster",
        ),
    ] = Field(description="how active units are found; named for a comparison, or where the best one is known")
    options: Annotated[Options, OptionsOf("method")] = Field(
        default={}, description="the selector's own options, as JSON"
    )


class AlgorithmSetting(Record):
    """Settings of stages that depend on how codes are chosen."""

    algorithm: Annotated[str, Key(plugins="coldpress.compiler.rounding")] = Field(
        default="rtn",
        description="how codes are chosen; rtn: round to nearest, gptq: corrected on calibration text, which "
        "loses less and takes longer",
    )


class ExploreSetting(AlgorithmSetting):
    """Settings of stages that measure quality curves."""

    explore_tokens: Annotated[PositiveCount, Key()] = Field(
        default=1024,
        description="validation tokens that method=auto measures selectors and formats on; whole blocks, at least "
        "one; more for closer choices",
    )
    explore: Annotated[Literal["needed", "whole"], Key()] = Field(
        default="needed",
        description="what method=auto measures: formats, and where the whole model does not fit, the selectors that "
        "can still win on the device; or all selectors, once per model, for many devices and for quotes",
    )


class CacheSetting(Record):
    """Settings of stages that depend on the runtime's cache."""

    cache: Annotated[
        str,
        Key(
            plugins="coldpress.runtime.cache",
            auto=True,
            default=f"`auto`: {DEFAULT_CACHE}, unless another policy is clearly faster on held-out tokens",
        ),
    ] = Field(
        default="auto",
        description="cache policy that manages the DRAM that is not pinned; belady is for simulations alone",
    )
    cache_options: Annotated[Options, OptionsOf("cache")] = Field(
        default={}, description="the cache policy's own options, as JSON"
    )


class DraftSetting(Record):
    """Settings of stages that depend on whether a run proposes tokens."""

    draft: Annotated[
        DraftName | None,
        Key(
            plugins="coldpress.runtime.drafts",
            auto=True,
            default="`auto` with draft_model, else `off`: drawn text repeats too little",
        ),
    ] = Field(
        default=None,
        description="what proposes next tokens of a single sequence, which the model checks in one pass; auto: the one "
        "that pays by validation text and the device's law, where a run reads and every token uses every unit; model: "
        "the draft_model, whatever it brings",
    )


class RoutingSetting(Record):
    """Settings of stages that depend on how a mixture's routers choose experts."""

    routing: Annotated[
        RoutingName,
        Key(
            plugins="coldpress.runtime.routing",
            auto=True,
            default=f"`auto` with method=auto and experts, else {EXACT_ROUTING}",
        ),
    ] = Field(
        default=EXACT_ROUTING,
        description="how a mixture's routers choose experts: top_k as the model was trained; cache_prior prefers those "
        "in DRAM, as far as routing_kl allows; auto: as far as max_ppl_ratio allows, where that is clearly faster",
    )


class RoutingLimitSetting(RoutingSetting):
    """Settings of stages that decide how far routers may go."""

    routing_kl: Annotated[PositiveFloat, Key()] = Field(
        default=0.01,
        description="largest divergence from the model's own routing on validation text, in nats per token, that a "
        "named routing such as cache_prior may cost; less for closer text, more for speed",
    )


class PinnedShareSetting(Record):
    """Settings of stages that decide what is pinned."""

    pinned_share: Annotated[
        Share | None, Key(default="the least with nearly the least modelled flash time; 1 where the cache is `static`")
    ] = Field(
        default=None, description="share of the units' DRAM that is pinned; given to compare pinning with caching"
    )


class QualitySetting(Record):
    """Settings of stages that hold the artifact to a quality."""

    max_ppl_ratio: Annotated[
        PositiveFloat | Off | None, Key(default="1.05: beyond it a build warns, and beyond 2.0 it is refused")
    ] = Field(
        default=None, description="largest allowed perplexity of the artifact over the source's, such as 1.05, or off"
    )


class SeedSetting(Record):
    """Settings of stages that draw random numbers."""

    seed: Annotated[int, Key()] = Field(
        default=0,
        ge=0,
        description="seed of everything that is drawn: text and weights; another one shows how far a result "
        "depends on chance",
    )


class TrainingSetting(SeedSetting):
    """Settings of stages that train the model."""

    distill_blocks: Annotated[PositiveCount, Key()] = Field(
        default=8,
        description="calibration blocks per update in distillation and relufication; fewer where memory is short",
    )
    validation_blocks: PositiveCount = Field(
        default=16, description="validation blocks that decide which trained weights are kept"
    )
    distill_evaluations: PositiveCount = Field(
        default=8, description="how often distillation and relufication look at validation text"
    )
    distill_patience: PositiveCount = Field(
        default=3, description="training ends after so many evaluations in a row without a lower validation loss"
    )


@dataclass(frozen=True)
class Course:
    """One run of training as the user configured it, with the names of its settings for messages."""

    stage: str
    key: str
    """Name of the setting that names the recipe."""
    recipe: str
    without: str
    """The setting that turns training off."""
    rate_key: str
    """Name of the setting for the first step size."""
    learning_rate: float
    steps: int
    shared: TrainingSetting
    threads: int


class DeviceSetting(Record):
    """Settings of stages that run the source model."""

    compute_device: Annotated[str, Key()] = Field(
        default="auto",
        description="torch's name of the device that calibration and distillation run on, or auto; cpu where no "
        "result may depend on a GPU",
    )
