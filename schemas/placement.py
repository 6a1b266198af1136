"""The result of `place`: where each unit is (PowerInfer 6, Eqs. 1-8), and the rank of units for DRAM.

Arrays: `<layer>.<family>` int8 [num_units], 0 for units pinned in DRAM and 1 for those on flash, and
`rank.<layer>.<family>` int32 [num_units], all unit ids: pinned ones first, then by falling impact, then id.
"""

from pydantic import Field

from coldpress.schemas.base import ArrayFile, Count, Record, Share
from coldpress.schemas.families import FamilyName


class LayerPlacement(Record):
    layer: Count
    family: FamilyName
    num_pinned: Count
    min_pinned: Count
    """C_l of PowerInfer Eq. 4: a layer pins no unit or at least this many."""


class PinnedShare(Record):
    """A candidate share of the units' DRAM for pinned units, and its cost."""

    share: Share
    flash_s_per_token: float = Field(ge=0)
    """Modelled flash time on held-out tokens; the rest of the DRAM is the plan's cache."""


class Placement(Record):
    solver: str
    layers: tuple[LayerPlacement, ...]
    arrays: ArrayFile
    objective: float
    """Sum of the pinned units' activation frequencies (Eq. 2)."""
    gap: Share
    """Proven relative distance to the optimum."""
    pinned_bytes: Count
    pinned_share: Share
    """Share of the units' DRAM for pinned units, as wanted; the rest is cache."""
    shares_tried: tuple[PinnedShare, ...] = ()
    """The candidates for the share; empty if the share was given or the cache admits nothing."""
