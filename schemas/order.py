"""The result of `order`: for each layer and family, the unit at each position on flash. Arrays of an entry: `order`
int32 [num_units], a permutation; order[position] is the unit id at that position."""

from pydantic import Field

from coldpress.schemas.base import ArrayFile, Count, PositiveCount, Record
from coldpress.schemas.families import FamilyName


class GapCost(Record):
    """The cost of a collapse gap (Ripple 5.1)."""

    gap_bytes: Count
    flash_s_per_token: float = Field(ge=0)
    """Modelled flash time of a token, in all layers of the group, for the units of the last calibration tokens that
    the plan's cache misses."""


class FamilyOrder(Record):
    """The order of one family in one layer, or in one group of consecutive layers."""

    layer: Count
    """The first layer of the group."""
    num_layers: PositiveCount = 1
    """Consecutive layers that share the order."""
    family: FamilyName
    heuristic: str
    """The file of compiler/stages/order that gave the order; with `auto` the winner, of several experts of most."""
    arrays: ArrayFile
    adjacent_coactivation: float
    """Share of activations whose flash neighbour is active on the same token; 0 if nothing was counted."""
    gap_costs: tuple[GapCost, ...] = ()
    """By ascending gap; all entries for one device have the same gaps. Empty in records made by hand."""

    @property
    def flash_s_per_token(self) -> float:
        """Returns the modelled flash time of a token with the best gap for the order."""
        return min((cost.flash_s_per_token for cost in self.gap_costs), default=0.0)


class Order(Record):
    """The result of `order` for a chunk of layers."""

    entries: tuple[FamilyOrder, ...]
