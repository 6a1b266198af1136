"""The result of `place`: the memory tier of each unit (PowerInfer 6, Eqs. 1-8), and the rank of units for DRAM.

Arrays: `<layer>.<family>` int8 [num_units], the index into `tiers` of the unit's tier, and `rank.<layer>.<family>`
int32 [num_units], all unit ids by tier, then falling impact, then id.
"""

from typing import Literal

from pydantic import Field

from coldpress.schemas.base import ArrayFile, Count, Record, Share
from coldpress.schemas.families import FamilyName

Tier = Literal["accelerator", "dram", "flash"]


class LayerPlacement(Record):
    layer: Count
    family: FamilyName
    num_pinned: Count
    """Units in any tier but the slowest."""
    min_pinned: Count
    """C_l of PowerInfer Eq. 4 for the fastest tier: a layer pins no unit or at least this many."""
    tier_units: tuple[Count, ...] = ()
    """Units in each tier but the slowest."""
    tier_min_units: tuple[Count, ...] = ()
    """C_l of each tier but the slowest."""


class PinnedShare(Record):
    """A candidate share of the units' DRAM for pinned units, and its cost."""

    share: Share
    flash_s_per_token: float = Field(ge=0)
    """Modelled flash time on held-out tokens; the rest of the DRAM is the plan's cache."""


class Placement(Record):
    solver: str
    tiers: tuple[Tier, ...]
    """Fastest first."""
    layers: tuple[LayerPlacement, ...]
    arrays: ArrayFile
    objective: float
    """Sum of the pinned units' activation frequencies (Eq. 2); tiers between are weighted by the time they save."""
    gap: Share
    """Proven relative distance to the optimum."""
    pinned_bytes: Count
    pinned_share: Share | None = None
    """Share of the units' DRAM for pinned units, as wanted; the rest is cache. None if flash is not a tier."""
    shares_tried: tuple[PinnedShare, ...] = ()
    """The candidates for the share; empty if the share was given or the cache admits nothing."""
