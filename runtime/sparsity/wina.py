"""WINA: the k units of largest |x| times the norm of their columns (weight-informed neuron activation, 2505.19427).

Reads what top-k reads, and of each unit the Euclidean norm of its weights in the source: an input that is large but
multiplies little is left out before one that is smaller and multiplies much. Columns of several matrices that make one
unit count together.
"""

from collections.abc import Mapping

import numpy as np

from coldpress.runtime.sparsity import DensitySource, Kept, Residency, topk
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = ("mlp_in", "mlp_mid", "attn_in", "attn_out")
KEPT: Mapping[str, Kept] = {**topk.KEPT, "unit_norms": Kept("float32", None)}
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False
EXACT = False
MISSED_SHARE = 0.0
SEES_RESIDENCY = False


class Options(topk.Options):
    """What is pruned: the same as with top-k."""


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """The inputs of all linear layers of the MLP, and of attention if that is asked for."""
    return topk.families(spec, options)


def densities(exact_zeros: bool) -> DensitySource:
    """A choice."""
    return "budget"


def fit(
    num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Options
) -> dict[str, np.ndarray]:
    """`num_selected` int32 [1] and `unit_norms` float32 [num_units].

    Raises:
        ColdpressError: if `statistics` has no norms.
    """
    if "unit_norms" not in statistics:
        raise ColdpressError(
            "wina needs the norms of the source's weights, which an artifact of another method does not have; build "
            "with method=wina"
        )
    return topk.fit(num_units, density, statistics, options) | {"unit_norms": statistics["unit_norms"]}


def select(signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
    """Ids of the k largest scores of `signal` float32 [num_units], int32 [k] ascending."""
    return topk.select(signal * arrays["unit_norms"], arrays, residency)


def select_many(activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The k largest scores of each token: float32 [T, num_units] -> bool alike."""
    return topk.select_many(activity * arrays["unit_norms"], arrays)
