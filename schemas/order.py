"""What `order` decides: for each layer and family, which unit lies at which place on flash.

Arrays of an entry: `order` int32 [num_units], a permutation; order[position] is the unit id at that position.
"""

from pydantic import Field

from coldpress.schemas.base import ArrayFile, Count, PositiveCount, Record
from coldpress.schemas.families import FamilyName


class GapCost(Record):
    """What a collapse gap (Ripple 5.1) costs."""

    gap_bytes: Count
    flash_s_per_token: float = Field(ge=0)
    """Modelled flash time of a token, in all layers of the group, for what the plan's cache misses of the last
    calibration tokens."""


class FamilyOrder(Record):
    """The order of one family in one layer, or in one group of consecutive layers."""

    layer: Count
    """The first layer of the group."""
    num_layers: PositiveCount = 1
    """Consecutive layers that share the order."""
    family: FamilyName
    heuristic: str
    """Whose order it is: the file of compiler/stages/order, or the winner where that is `auto`."""
    arrays: ArrayFile
    adjacent_coactivation: float
    """Share of activations whose flash neighbour is active on the same token; 0 where nothing was counted."""
    gap_costs: tuple[GapCost, ...] = ()
    """By ascending gap, the same gaps in every entry for one device; empty in records made by hand."""

    @property
    def flash_s_per_token(self) -> float:
        """Modelled flash time of a token under the gap that suits the order best."""
        return min((cost.flash_s_per_token for cost in self.gap_costs), default=0.0)


class Order(Record):
    """What `order` gives for a chunk of layers."""

    entries: tuple[FamilyOrder, ...]
