"""The records of a quote: figures with an interval, a basis in words, and the command that verifies them."""

from typing import Literal

from coldpress.schemas.base import Count, PositiveCount, Record, Share
from coldpress.schemas.families import FormatName, Method
from coldpress.schemas.layout import CacheName, KvCacheFormat
from coldpress.schemas.sparsity import ByLayer, Tried

Basis = Literal["measured", "same kind of model", "none"]
"""Origin of a quote's curves and signals: this model's, those of a model of the same kind, or nobody's."""


class Estimate(Record):
    """One figure; its unit is in its name."""

    value: float | None
    """None if nobody knows."""
    low: float | None = None
    high: float | None = None
    """The interval; None if the figure is exact or a bound."""
    is_most: bool = False
    """True if the true figure is at most `value`."""
    basis: str
    verify: str | None = None
    """The command that measures it; None if nothing has to be measured."""


class QuotedChoice(ByLayer):
    method: Method
    format: FormatName
    kv_cache: KvCacheFormat
    cache: CacheName
    density: Share
    reason: str


class Step(ByLayer):
    """A DRAM budget, and the speed with it."""

    dram_budget_bytes: PositiveCount
    tokens_per_s: float
    method: Method
    format: FormatName
    ratio: float
    """Its speed over that of the quoted budget; 0 where that fits nothing."""


class DeviceQuote(Record):
    """A model on one device with one DRAM budget."""

    device: str
    fits: bool
    """True if the model fits; of several budgets of one build, if all of them do."""
    dram_budget_bytes: Count
    refusal: str | None = None
    """Reason why it, or the build of all budgets, does not fit."""
    choice: QuotedChoice | None = None
    bound: Literal["flash", "computing", "DRAM"] | None = None
    """Part that takes most of a token's time; DRAM stands for computing, which the law counts by bytes."""
    figures: dict[str, Estimate]
    """By name: tokens_per_s, token_flash_bytes, token_reads, hit_rate, flash_share, first_token_s, ppl_ratio,
    least_dram_bytes, recommended_dram_bytes, disk_bytes, download_bytes, build_s, written_bytes, token_energy_j;
    with a draft model drafted_tokens_per_s. A budget that fits nothing has the two figures of DRAM alone."""
    next_budget: Step | None = None
    """The least larger budget that is clearly faster; None if none is, or none was tried."""
    steps: tuple[Step, ...] = ()
    """All budgets that were tried, ascending; none where several were asked for."""
    tried: tuple[Tried, ...] = ()
    """The best candidate of each selector; for selectors without one, the reason."""


class Quote(Record):
    model: str
    source: Literal["artifact", "build", "config"]
    basis: Basis
    basis_in_words: str
    max_ppl_ratio: float | None
    """None if nothing limits the choice: its method was given, or max_ppl_ratio=off."""
    context_length: PositiveCount
    prompt_tokens: PositiveCount
    devices: tuple[DeviceQuote, ...]
    """One for each device in the order asked for; where several DRAM budgets were asked for, one for each budget of
    each device, the largest first."""
