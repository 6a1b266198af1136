"""Returns a family's statistics to stages that need bits or counts, and refuses in one sentence if there are none."""

from coldpress.schemas.activations import Activations, FamilyStatistics
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FamilyName


def counted(activations: Activations, layer: int, family: FamilyName) -> FamilyStatistics:
    """Returns the statistics of a family, with bits and counts; raises ColdpressError if the family has none."""
    found = activations.layers[layer].family(family)
    if found is None or found.density is None:
        raise ColdpressError(
            f"layer {layer}: no activation bits of family {family} in the statistics; "
            "delete calibrate.json and recalibrate.json from the build folder and build again"
        )
    return found
