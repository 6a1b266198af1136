"""CATS: the units whose |act(gate)| reaches the level of their layer (contextually aware thresholding).

Reads act(gate), which the gate's matrix gives from DRAM before up and down are read, as `gate` does; but a token uses
as many units as reach a level, which calibration's magnitudes give for a density, not a fixed number (DIP 6.1). Without
a gate it reads the inner activation.
"""

from collections.abc import Mapping

from coldpress.runtime.sparsity import DensitySource, Kept, ReadingOptions, threshold
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = ("up_down", "mlp_mid")
KEPT: Mapping[str, Kept] = threshold.KEPT
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False
EXACT = False
MISSED_SHARE = 0.0
SEES_RESIDENCY = False


class Options(ReadingOptions):
    """None: the level follows from the density."""


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """Up and down, which the gate decides about; without a gate, down."""
    return ("up_down",) if spec.gated_mlp else ("mlp_mid",)


def densities(exact_zeros: bool) -> DensitySource:
    """A choice."""
    return "budget"


fit, select, select_many = threshold.fit, threshold.select, threshold.select_many
