"""FATReLU: of what a ReLU leaves, only what reaches a level (LLM in a flash C.5, after Kurtz et al. 2020).

Reads the exact activations, as `relu` does: act(gate) for `up_down`, the inner activation for `mlp_mid`; a unit below
the level counts as zero. The level is that of a density, from calibration's magnitudes; a density above the share that
is not zero anyway leaves out zeros alone.
"""

from collections.abc import Mapping

from coldpress.runtime.sparsity import DensitySource, Kept, ReadingOptions, relu, threshold
from coldpress.schemas.model import ModelSpec

CHOOSES = relu.CHOOSES
KEPT: Mapping[str, Kept] = threshold.KEPT
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = True
EXACT = False
MISSED_SHARE = 0.0
SEES_RESIDENCY = False


class Options(ReadingOptions):
    """None: the level follows from the density."""


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """What is left once the matrix that decides stays in DRAM: the gate, or up of a model without one."""
    return relu.families(spec, relu.Options())


def densities(exact_zeros: bool) -> DensitySource:
    """A choice, within what the activations have."""
    return "capped"


fit, select, select_many = threshold.fit, threshold.select, threshold.select_many
