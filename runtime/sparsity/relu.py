"""ReLU: the units whose activation is not exactly zero. Nothing that counts is left out: the result is the dense one.

Reads the exact activations, which a matrix that stays in DRAM gives before anything is read from flash: act(gate) for
`up_down` (PowerInfer 2.1, CATS), the MLP's inner activation for `mlp_mid`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from schemas.families import FamilyName

FAMILIES: tuple[FamilyName, ...] = ("up_down", "mlp_mid")
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = True


@dataclass(frozen=True)
class Parameters:
    """None: zero is zero."""


def fit(num_units: int, density: float, arrays: Mapping[str, np.ndarray]) -> Parameters:
    """The parameters; the density is whatever the activations have."""
    return Parameters()


def select(signal: np.ndarray, parameters: Parameters, cached: np.ndarray) -> np.ndarray:
    """Ids of the non-zero entries of `signal` float32 [num_units], int32 ascending; possibly none.

    ReLU's own output is never negative, but its product with the up projection is: the test is for zero, not for sign.
    """
    return np.flatnonzero(signal).astype(np.int32)
