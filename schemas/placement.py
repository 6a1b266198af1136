"""What `place` decides: which memory tier keeps each unit (PowerInfer 6, Eqs. 1-8), and which deserve DRAM first.

Arrays: `<layer>.<family>` int8 [num_units], the index into `tiers` of the tier that keeps the unit, and
`rank.<layer>.<family>` int32 [num_units], all unit ids by tier, then falling impact, then id.
"""

from typing import Literal

from pydantic import Field

from coldpress.schemas.base import ArrayFile, Count, Record, Share
from coldpress.schemas.families import FamilyName

Tier = Literal["accelerator", "dram", "flash"]


class LayerPlacement(Record):
    """Pinned units of one family in one layer."""

    layer: Count
    family: FamilyName
    num_pinned: Count
    """Units in any tier but the slowest."""
    min_pinned: Count
    """C_l of PowerInfer Eq. 4 for the fastest tier: a layer pins none or at least so many."""
    tier_units: tuple[Count, ...] = ()
    """Units in each tier but the slowest."""
    tier_min_units: tuple[Count, ...] = ()
    """C_l of each tier but the slowest."""


class PinnedShare(Record):
    """A share of the units' DRAM that might be pinned, and what it would cost."""

    share: Share
    flash_s_per_token: float = Field(ge=0)
    """Modelled flash time on held-out tokens, the rest of the DRAM being the plan's dynamic cache."""


class Placement(Record):
    """The solver's answer."""

    solver: str
    tiers: tuple[Tier, ...]
    """Fastest first."""
    layers: tuple[LayerPlacement, ...]
    arrays: ArrayFile
    objective: float
    """Sum of the pinned units' activation frequencies (Eq. 2), those of tiers between weighted by the time saved."""
    gap: Share
    """Proven relative distance to the optimum."""
    pinned_bytes: Count
    pinned_share: Share | None = None
    """Share of the units' DRAM that was to be pinned, the rest being cache; None where flash is no tier."""
    shares_tried: tuple[PinnedShare, ...] = ()
    """What the share was chosen from; empty where it was given or the cache admits nothing."""
