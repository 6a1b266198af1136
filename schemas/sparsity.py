"""What `allocate` decides: method, density per layer and family, and how the DRAM budget is divided.

Arrays: `<layer>.<family>.<name>`, what the selector fitted for a family of a layer (runtime/sparsity).
"""

from pydantic import Field

from coldpress.schemas.base import ArrayFile, Count, Options, PositiveCount, Record, Share
from coldpress.schemas.families import FamilyName, FormatName, Method
from coldpress.schemas.layout import KvCacheFormat, layer_groups


class Budget(Record):
    """DRAM in bytes, by use; the parts sum to at most `dram_budget_bytes`."""

    dram_budget_bytes: PositiveCount
    resident_bytes: Count
    """Always-in-DRAM tensors, as stored in the artifact (quantized where they are)."""
    predictor_bytes: Count
    kv_cache_bytes: Count
    bookkeeping_bytes: Count
    """Tables, slot maps, objects and a token's working memory (runtime/plan/bookkeeping.py)."""
    buffer_bytes: Count
    """The read buffer."""
    cache_bytes: Count
    """Pinned units and cache slots: what is left."""


class Densities(Record):
    """Share of a family's units that are used per token, layer by layer."""

    family: FamilyName
    per_layer: tuple[Share, ...]


class Tried(Record):
    """What `auto` found out about a method before it chose: its seconds, or why it is no candidate."""

    method: Method
    token_s: float | None = Field(default=None, ge=0)
    """Modelled seconds of a decoded token; None where the method was skipped."""
    skipped: str | None = None
    """Why the method was skipped; None where it was judged."""
    needed_bytes: Count | None = None
    """DRAM that a skipped method needs before it caches any unit; None where that was not the reason."""


class Sparsity(Record):
    """The decision of `allocate`."""

    method: Method
    options: Options = Field(default={})
    """The selector's own."""
    arrays: ArrayFile | None = None
    """None where the selector needs none."""
    format: FormatName
    context_length: PositiveCount
    kv_cache: KvCacheFormat = "fp16"
    """How the runtime is to keep keys and values."""
    densities: tuple[Densities, ...]
    predictor_rank: tuple[Count, ...]
    """The largest hidden size of each layer's predictor: 0 where the density is 1; empty where the method has none."""
    predictor_limit_bytes: Count = 0
    """What all predictors take at most; `budget` has what they are expected to."""
    predictor_format: FormatName | None = None
    """How predictors are stored; None where the method has none."""
    budget: Budget
    tried: tuple[Tried, ...] = ()
    """The methods that `auto` compared or skipped; empty where the method was given."""
    layers_per_group: PositiveCount = 1
    """Consecutive layers whose units lie together on flash (ActiveFlow 3, Fig. 9); the last group may be smaller."""

    @property
    def families(self) -> tuple[FamilyName, ...]:
        """What lies on flash, in the order of `densities`."""
        return tuple(found.family for found in self.densities)

    def groups(self, num_hidden_layers: int) -> tuple[range, ...]:
        """The layer numbers of each group, in order."""
        return layer_groups(num_hidden_layers, self.layers_per_group)

    def density(self, family: FamilyName, layer: int) -> float:
        """Density of one family in one layer."""
        return next(found for found in self.densities if found.family == family).per_layer[layer]

    @property
    def is_whole(self) -> bool:
        """Whether every token uses every unit."""
        return all(share == 1.0 for found in self.densities for share in found.per_layer)
