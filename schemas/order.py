"""What `order` decides: for each layer and family, which unit lies at which place on flash.

Arrays of an entry: `order` int32 [num_units], a permutation; order[position] is the unit id at that position.
"""

from schemas.base import ArrayFile, Count, Record
from schemas.families import FamilyName


class FamilyOrder(Record):
    """The order of one family in one layer."""

    layer: Count
    family: FamilyName
    heuristic: str
    arrays: ArrayFile
    adjacent_coactivation: float
    """Share of activations whose flash neighbour is active on the same token; 0 where nothing was counted."""


class Order(Record):
    """What `order` gives for a chunk of layers."""

    entries: tuple[FamilyOrder, ...]
