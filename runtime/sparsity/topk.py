"""Top-k: the k units of largest |signal|, k being the family's density times its units (ActiveFlow 2.1, DIP Eq. 6).

Reads the vector that the units multiply: the MLP's input for `mlp_in`, its inner activation for `mlp_mid`, act(gate)
for `up_down` (CATS). Ties go to the lower id, so that the choice is a function of the signal alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from schemas.families import FamilyName

FAMILIES: tuple[FamilyName, ...] = ("up_down", "mlp_in", "mlp_mid")
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False


@dataclass(frozen=True)
class Parameters:
    """How many units are used."""

    num_selected: int


def fit(num_units: int, density: float, arrays: Mapping[str, np.ndarray]) -> Parameters:
    """k = density * num_units, rounded (half to even), at least 1 and at most `num_units`."""
    return Parameters(min(num_units, max(1, round(density * num_units))))


def select(signal: np.ndarray, parameters: Parameters, cached: np.ndarray) -> np.ndarray:
    """Ids of the k largest |signal|, `signal` being float32 [num_units]; int32 [k] ascending."""
    magnitude = np.abs(signal)
    num_units, k = magnitude.size, parameters.num_selected
    if k >= num_units:
        return np.arange(num_units, dtype=np.int32)
    smallest = np.partition(magnitude, num_units - k)[num_units - k]
    chosen = magnitude > smallest
    tied = np.flatnonzero(magnitude == smallest)
    chosen[tied[: k - int(np.count_nonzero(chosen))]] = True
    return np.flatnonzero(chosen).astype(np.int32)
