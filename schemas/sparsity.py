"""The result of `allocate`: method, density per layer and family, and the division of the DRAM budget.

Arrays: `<layer>.<family>.<name>`, the fitted arrays of the selector for a family of a layer (runtime/sparsity).
"""

from pydantic import Field

from coldpress.schemas.base import ArrayFile, Count, Extended, Options, PositiveCount, Record, Share
from coldpress.schemas.curves import Curves
from coldpress.schemas.families import (
    FamilyName,
    FormatName,
    Formats,
    HeadFormat,
    KeptFormat,
    Method,
    UnitFormat,
    layers_of,
    mlp_density,
    used_share,
    with_own,
)
from coldpress.schemas.layout import CacheName, KvCacheFormat, RoutingName, layer_groups
from coldpress.schemas.memory import Held
from coldpress.schemas.model import ModelSpec


class Budget(Extended):
    """DRAM in bytes, by use (schemas/memory.py); the parts sum to at most `dram_budget_bytes`."""

    LATER = ("draft_bytes",)

    dram_budget_bytes: PositiveCount
    resident_bytes: Count
    predictor_bytes: Count
    kv_cache_bytes: Count
    bookkeeping_bytes: Count
    buffer_bytes: Count
    cache_bytes: Count
    """Pinned units and cache slots: the rest of the budget."""
    draft_bytes: Count = 0
    """The draft model; 0, which is left out of the file, without one."""

    @property
    def held(self) -> Held:
        """Returns all uses but units."""
        besides = self.resident_bytes, self.predictor_bytes, self.kv_cache_bytes, self.bookkeeping_bytes
        return Held(*besides, self.buffer_bytes, self.draft_bytes)


class Densities(Record):
    """Share of a family's units that a token uses, layer by layer."""

    family: FamilyName
    per_layer: tuple[Share, ...]


class ByLayer(Extended):
    """A record with a format whose layers, and whose other matrices, may have formats of their own."""

    LATER = ("layer_formats", "head", "kept")

    layer_formats: tuple[UnitFormat, ...] = ()
    """The format of each layer's units, or of each of its matrices, where they differ, `format` the coarsest; else
    empty, which is left out of the file."""
    head: HeadFormat | None = None
    """The head's own format; None, which is left out of the file, if it has the one that goes with `format`."""
    kept: tuple[KeptFormat, ...] = ()
    """Matrices that keep the codes of a quantized file; empty, which is left out of the file, where none has others."""

    def beside(self, format_name: FormatName) -> Formats:
        """Returns the formats of all matrices, from the record's `format`."""
        return with_own(self.layer_formats or format_name, self.head, self.kept)


class SearchedRouting(Record):
    """Routers that prefer experts in DRAM (runtime/routing), as a search judged them: equally in all layers."""

    routing: RoutingName
    strength: float = Field(gt=0)
    mean_kld: float = Field(gt=0)
    """Divergence from the model's own routing there, its error added: what stage `route` divides among layers."""


class Tried(ByLayer):
    """A candidate that `auto` considered: its modelled seconds, or why it was skipped."""

    LATER = (*ByLayer.LATER, "routing")

    method: Method
    format: FormatName | None = None
    cache: CacheName | None = None
    """Format and cache; None if the method was skipped in all of them."""
    kv_cache: KvCacheFormat | None = None
    """The format of keys and values; None if the method was skipped."""
    token_s: float | None = Field(default=None, ge=0)
    """Modelled seconds of a decoded token; None if the method was skipped."""
    skipped: str | None = None
    """Reason for which the method was skipped; None if it was judged."""
    reason: str | None = None
    """Reason in words: how it compares with a dense run, and why it was taken; None if it was skipped."""
    density: Share | None = None
    """The share of the MLP's weights that a token used where it was judged, on average over layers, in a mixture of the
    experts that the router picks; None if it was skipped."""
    ppl_ratio: float | None = None
    """The perplexity ratio to expect there (stage `explore`); None if nobody knows."""
    hit_rate: Share | None = None
    """Share of the used units that the cache held; None where every token uses every unit, and if it was skipped."""
    routing: SearchedRouting | None = None
    """None, which is left out of the file, if routers choose as the model was trained."""
    dram_bytes: Count | None = None
    """DRAM that it needs: the budget, or less if that holds everything; None if it was skipped."""
    needed_bytes: Count | None = None
    """DRAM that a skipped method needs before it caches any unit; None if that was not the reason."""


class Decision(Record):
    """The decision for one DRAM budget, apart from what all budgets of an artifact share."""

    options: Options = Field(default={})
    arrays: ArrayFile | None = None
    """None if the selector stores no arrays."""
    densities: tuple[Densities, ...]
    budget: Budget
    cache: CacheName = "lfu"
    cache_options: Options = Field(default={})
    tried: tuple[Tried, ...] = ()
    """The best candidate of each selector that `auto` compared under this budget, the taken one first, and the
    selectors that it skipped; empty if the method was given."""
    front: tuple[Tried, ...] = ()
    """The Pareto front of speed, quality and DRAM under this budget: no other candidate is better in all three. The
    fastest first; empty if the method was given."""

    @property
    def routing(self) -> SearchedRouting | None:
        """Returns the routing that a search took; None if routers choose as the model was trained."""
        return self.tried[0].routing if self.tried else None


class Sparsity(Decision, ByLayer):
    """The decision of `allocate` for the largest DRAM budget, whose plan runs by default; `smaller` has the others."""

    LATER = (*ByLayer.LATER, "curves")

    method: Method
    format: FormatName
    context_length: PositiveCount
    kv_cache: KvCacheFormat = "fp16"
    predictor_rank: tuple[Count, ...]
    """The largest hidden size of each layer's predictor: 0 if the density is 1; empty if the method has none."""
    predictor_limit_bytes: Count = 0
    """The most bytes of all predictors together; `budget` has the expected bytes."""
    predictor_format: FormatName | None = None
    """The format of predictors; None if the method has none."""
    layers_per_group: PositiveCount = 1
    """Consecutive layers whose units lie together on flash (ActiveFlow 3, Fig. 9); the last group may be smaller."""
    smaller: tuple[Decision, ...] = ()
    """The further budgets, the largest first."""
    curves: Curves | None = None
    """Those of `explore` and of this stage; None, which is left out of the file, where the method was given."""

    @property
    def formats(self) -> Formats:
        return self.beside(self.format)

    @property
    def decisions(self) -> tuple["Sparsity", ...]:
        """Returns the decision for each budget alone, the largest first."""
        alone = self.model_copy(update={"smaller": ()})
        return (
            alone,
            *(
                alone.model_copy(update={name: getattr(decision, name) for name in Decision.model_fields})
                for decision in self.smaller
            ),
        )

    @property
    def smallest(self) -> "Sparsity":
        """Returns the decision for the smallest budget. Reading costs most there, so that stages which prepare what all
        budgets share (weights, counts, pins, orders, predictors) prepare it for this one."""
        return self.decisions[-1]

    @property
    def families(self) -> tuple[FamilyName, ...]:
        return tuple(found.family for found in self.densities)

    def groups(self, num_hidden_layers: int) -> tuple[range, ...]:
        return layer_groups(num_hidden_layers, self.layers_per_group)

    def density(self, family: FamilyName, layer: int) -> float:
        return next(found for found in self.densities if found.family == family).per_layer[layer]

    def mlp_density(self, spec: ModelSpec) -> float:
        """Returns the share of the MLP's weights that a token uses, on average over layers; in a mixture, of the
        experts that the router picks."""
        shares: dict[str, float] = {}
        for entry in self.densities:
            having = layers_of(entry.family, spec)
            mean = sum(entry.per_layer[layer] for layer in having) / len(having)
            shares[entry.family] = mean / used_share(entry.family, spec)
        return min(1.0, mlp_density(shares, spec))

    @property
    def is_whole(self) -> bool:
        """Returns whether every token uses every unit."""
        return all(share == 1.0 for found in self.densities for share in found.per_layer)
