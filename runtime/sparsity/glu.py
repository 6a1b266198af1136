"""GLU pruning: the k units of largest |GLU(x)|, the inner activation (DIP Eq. 4).

Gate and up have to be computed in full first, so columns of the down projection are what a runtime can leave out, at
most a third of the MLP. As an oracle, which knows the units before anything is computed, it is the bound that DIP's
tables give.
"""

from collections.abc import Mapping

from coldpress.runtime.sparsity import DensitySource, Kept, _parts_of_glu, topk
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = ("mlp_mid",)
KEPT: Mapping[str, Kept] = topk.KEPT
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False
EXACT = False
MISSED_SHARE = 0.0
SEES_RESIDENCY = False


class Options(_parts_of_glu.Options):
    """Whether it is to be built or only to be judged."""


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """Down alone.

    Raises:
        ColdpressError: if it is to be an oracle.
    """
    return _parts_of_glu.families("glu", "mlp_mid", spec, options)


def densities(exact_zeros: bool) -> DensitySource:
    """A choice."""
    return "budget"


fit, select, select_many = topk.fit, topk.select, topk.select_many
