"""Dense: every unit of every family, on every token. The baseline of all comparisons, and right for any artifact.

Reads nothing but the number of units; returns all their ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import schemas.families

FAMILIES: tuple[str, ...] = tuple(schemas.families.FAMILIES)
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False


@dataclass(frozen=True)
class Parameters:
    """The number of units, all of which are used."""

    num_units: int


def fit(num_units: int, density: float, arrays: Mapping[str, np.ndarray]) -> Parameters:
    """The parameters; `density` and `arrays` play no part."""
    return Parameters(num_units)


def select(signal: np.ndarray, parameters: Parameters, cached: np.ndarray) -> np.ndarray:
    """All ids, int32 [num_units] ascending; `signal` and `cached` play no part."""
    return np.arange(parameters.num_units, dtype=np.int32)
