"""What `order` decides: for each layer and family, which unit lies at which place on flash.

Arrays of an entry: `order` int32 [num_units], a permutation; order[position] is the unit id at that position. Beside it
lie what the entry repeats: `heuristic` uint8, a name in ASCII, `collapse_gap_bytes` int64 [1], `flash_s_per_token`
float64 [1].
"""

from pydantic import Field

from schemas.base import ArrayFile, Count, Record
from schemas.families import FamilyName


class FamilyOrder(Record):
    """The order of one family in one layer."""

    layer: Count
    family: FamilyName
    heuristic: str
    """Whose order it is: the file of compiler/order, or the winner where that is `auto`."""
    arrays: ArrayFile
    adjacent_coactivation: float
    """Share of activations whose flash neighbour is active on the same token; 0 where nothing was counted."""
    collapse_gap_bytes: Count = 0
    """The collapse gap (Ripple 5.1) that suits the order best on the last calibration tokens."""
    flash_s_per_token: float = Field(default=0.0, ge=0)
    """Modelled flash time of a token under that gap, for what the plan's cache misses of those tokens."""


class Order(Record):
    """What `order` gives for a chunk of layers."""

    entries: tuple[FamilyOrder, ...]
