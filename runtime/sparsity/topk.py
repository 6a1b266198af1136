"""Top-k: the k units of largest |signal|, k being the family's density times its units (ActiveFlow 2.1).

Reads the vector that the units multiply, or that says how much they matter: the MLP's input for `mlp_in`, its inner
activation, as the pruned inputs leave it, for `mlp_mid` (DIP Eqs. 7-8 with one density), act(gate) for `up_down` and
the up projection for `gate_down` (gate and up pruning), and with `attention` the inputs of attention's matrices (TEAL).
Ties go to the lower id, so that the choice is a function of the signal alone.
"""

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from coldpress.runtime.sparsity import DensitySource, Kept, ReadingOptions, Residency
from coldpress.schemas.base import Record
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = ("up_down", "gate_down", "mlp_in", "mlp_mid", "attn_in", "attn_out")
KEPT: Mapping[str, Kept] = {"num_selected": Kept("int32")}
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False
EXACT = False
MISSED_SHARE = 0.0
SEES_RESIDENCY = False


class Options(ReadingOptions):
    """What is pruned."""

    attention: bool = Field(default=False, description="true or false: whether attention's matrices are pruned, too")


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """The inputs of all linear layers of the MLP, and of attention if that is asked for."""
    return ("attn_in", "attn_out", "mlp_in", "mlp_mid") if options.attention else ("mlp_in", "mlp_mid")


def densities(exact_zeros: bool) -> DensitySource:
    """A choice."""
    return "budget"


def num_selected(num_units: int, density: float) -> int:
    """k = density * num_units, rounded (half to even), at least 1 and at most `num_units`."""
    return min(num_units, max(1, round(density * num_units)))


def fit(num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Record) -> dict[str, np.ndarray]:
    """`num_selected` int32 [1]."""
    return {"num_selected": np.array([num_selected(num_units, density)], np.int32)}


def select(signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
    """Ids of the k largest |signal|, `signal` being float32 [num_units]; int32 [k] ascending."""
    return np.flatnonzero(select_many(signal[None], arrays)[0]).astype(np.int32)


def select_many(activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The k largest |activity| of each token: float32 [T, num_units] -> bool alike."""
    return largest(np.abs(activity), max(1, int(arrays["num_selected"][0])))


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Where the k largest of each row of float32 [T, num_units] are, bool alike; ties go to the lower id."""
    num_units = values.shape[1]
    if k >= num_units:
        return np.ones(values.shape, bool)
    smallest = np.partition(values, num_units - k, axis=1)[:, num_units - k, None]
    chosen = values > smallest
    lacking = k - np.count_nonzero(chosen, axis=1)
    tied = values == smallest
    several = np.flatnonzero(np.count_nonzero(tied, axis=1) > lacking)
    tied[several] &= np.cumsum(tied[several], axis=1) <= lacking[several, None]
    return chosen | tied
