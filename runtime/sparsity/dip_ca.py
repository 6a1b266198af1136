"""DIP-CA: dynamic input pruning that prefers what is in DRAM (DIP 5.2, Eq. 10, Algorithm 1).

Reads what `dip` reads, and which units a cache holds when a token comes to a layer: the magnitudes of the others count
`gamma` times before the largest are taken. With gamma = 1 it is `dip`; with 0 nothing is read that the cache could
replace. The paper takes 0.2 in all models and layers, tuned on validation text.
"""

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from coldpress.runtime.sparsity import DensitySource, Kept, Residency, dip, topk
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = dip.CHOOSES
KEPT: Mapping[str, Kept] = {**topk.KEPT, "gamma": Kept("float32")}
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False
EXACT = False
MISSED_SHARE = 0.0
SEES_RESIDENCY = True

NEVER = 1e-200
"""Stands for gamma = 0: below any ratio of two float32, yet it keeps the order among what is not in DRAM."""


class Options(dip.Options):
    """DIP's, and how much what is not in DRAM counts."""

    gamma: float = Field(
        default=0.2, ge=0, le=1, description="factor on the magnitude of what is not in DRAM (DIP Eq. 10)"
    )


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """The inputs of the MLP's matrices."""
    return dip.families(spec, options)


def densities(exact_zeros: bool) -> DensitySource:
    """A choice, divided among the families."""
    return dip.densities(exact_zeros)


def divide(density: float, spec: ModelSpec, options: Options) -> dict[str, float]:
    """As `dip.divide`."""
    return dip.divide(density, spec, options)


def fit(
    num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Options
) -> dict[str, np.ndarray]:
    """`num_selected` int32 [1] and `gamma` float32 [1]."""
    return topk.fit(num_units, density, statistics, options) | {"gamma": np.array([options.gamma], np.float32)}


def select(signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
    """Ids of the k largest scores of `signal` float32 [num_units], int32 [k] ascending.

    Eq. 10 also divides by the largest magnitude, for a threshold that holds for all tokens; the k largest are the same.
    """
    weight = np.where(residency.present, 1.0, max(float(arrays["gamma"][0]), NEVER))
    return topk.select(np.abs(signal) * weight, arrays, residency)


def select_many(activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The choice where nothing is in DRAM, which is DIP's: float32 [T, num_units] -> bool alike."""
    return topk.select_many(activity, arrays)
