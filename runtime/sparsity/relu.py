"""ReLU: the units whose activation is not exactly zero. Nothing that counts is left out: the result is the dense one.

Reads the exact activations, which a matrix that stays in DRAM gives before anything is read from flash (LLM in a flash,
C.5: the gate as an exact predictor): act(gate) for `up_down`, the MLP's inner activation for `mlp_mid`.
"""

from collections.abc import Mapping

import numpy as np

from coldpress.runtime.sparsity import DensitySource, Kept, Residency
from coldpress.schemas.base import Record
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = ("up_down", "mlp_mid")
KEPT: Mapping[str, Kept] = {}
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = True
EXACT = True
MISSED_SHARE = 0.0
SEES_RESIDENCY = False


class Options(Record):
    """None: zero is zero."""


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """What is left once the matrix that decides stays in DRAM: the gate, or up of a model without one."""
    return ("up_down",) if spec.gated_mlp else ("mlp_mid",)


def densities(exact_zeros: bool) -> DensitySource:
    """Whatever the activations have."""
    return "measured"


def fit(
    num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Options
) -> dict[str, np.ndarray]:
    """Nothing to know."""
    return {}


def select(signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
    """Ids of the non-zero entries of `signal` float32 [num_units], int32 ascending; possibly none.

    ReLU's own output is never negative, but its product with the up projection is: the test is for zero, not for sign.
    """
    return np.flatnonzero(signal).astype(np.int32)


def select_many(activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Where `activity` float32 [T, num_units] is not zero, bool alike."""
    return activity != 0
