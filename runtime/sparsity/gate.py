"""Gate pruning: the k units of largest |act(gate)| (DIP Eq. 5).

Reads act(gate), which the gate's matrix gives from DRAM; rows of up and columns of down are what is left out, at most
two thirds of the MLP. Without a gate it reads the inner activation.
"""

from collections.abc import Mapping

from coldpress.runtime.sparsity import DensitySource, Kept, _parts_of_glu, topk
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = ("up_down", "mlp_mid")
KEPT: Mapping[str, Kept] = topk.KEPT
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False
EXACT = False
MISSED_SHARE = 0.0
SEES_RESIDENCY = False


class Options(_parts_of_glu.Options):
    """Whether it is to be built or only to be judged."""


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """Up and down, which the gate decides about; without a gate, down.

    Raises:
        ColdpressError: if it is to be an oracle.
    """
    return _parts_of_glu.families("gate", "up_down", spec, options)


def densities(exact_zeros: bool) -> DensitySource:
    """A choice."""
    return "budget"


fit, select, select_many = topk.fit, topk.select, topk.select_many
