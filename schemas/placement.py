"""What `place` decides: which units are pinned in DRAM (PowerInfer 6, Eqs. 1-8).

Arrays: `<layer>.<family>` int8 [num_units], the index into `tiers` of the tier that keeps the unit.
"""

from typing import Literal

from schemas.base import ArrayFile, Count, Record, Share
from schemas.families import FamilyName

Tier = Literal["accelerator", "dram", "flash"]


class LayerPlacement(Record):
    """Pinned units of one family in one layer."""

    layer: Count
    family: FamilyName
    num_pinned: Count
    min_pinned: Count
    """C_l of PowerInfer Eq. 4: a layer pins none or at least so many."""


class Placement(Record):
    """The solver's answer."""

    solver: str
    tiers: tuple[Tier, ...]
    layers: tuple[LayerPlacement, ...]
    arrays: ArrayFile
    objective: float
    """Sum of the pinned units' activation frequencies (Eq. 2)."""
    gap: Share
    """Proven relative distance to the optimum."""
    pinned_bytes: Count
