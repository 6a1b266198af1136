"""Predictor: the units that a small two-layer network expects to be active (LLM-in-a-flash 3.1 and B, PowerInfer 5.1).

Reads the MLP's input after its norm, before anything of the MLP is computed; scores = fc2 · relu(fc1 · x), and a unit
is used where its score reaches the layer's threshold. Scores come straight from the stored codes, sums are float32. A
layer without a predictor is one where nothing is left out: it uses all units.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from runtime.kernels import gemv
from schemas.families import FamilyName

FAMILIES: tuple[FamilyName, ...] = ("neuron",)
NEEDS_PREDICTORS = True
NEEDS_EXACT_ZEROS = False


@dataclass(frozen=True)
class Network:
    """Codes uint8 [rows, row_bytes] of fc1 [rank, hidden_size] and fc2 [num_units, rank] in `format`, and the score
    from which a unit is used."""

    fc1: np.ndarray
    fc2: np.ndarray
    format: str
    threshold: float


@dataclass(frozen=True)
class Parameters:
    """A layer's predictor; None where all of its `num_units` are used."""

    num_units: int
    network: Network | None


def fit(num_units: int, density: float, arrays: Mapping[str, np.ndarray]) -> Parameters:
    """The predictor with its threshold.

    Args:
        num_units: Units of the family.
        density: Plays no part: the threshold decides how many are used.
        arrays: `fc1`, `fc2` and `threshold` as in `Network`, `format` as text []; or nothing.
    """
    if not arrays:
        return Parameters(num_units, None)
    network = Network(arrays["fc1"], arrays["fc2"], str(arrays["format"]), float(arrays["threshold"]))
    return Parameters(num_units, network)


def select(signal: np.ndarray, parameters: Parameters, cached: np.ndarray) -> np.ndarray:
    """Ids whose score reaches the threshold, int32 ascending; the best one alone where none does.

    Args:
        signal: The MLP's input, float32 [hidden_size].
        parameters: From `fit`.
        cached: Plays no part.
    """
    network = parameters.network
    if network is None:
        return np.arange(parameters.num_units, dtype=np.int32)
    inner = gemv.gemv(network.fc1, signal.size, network.format, signal)
    rectified = np.maximum(inner, 0, dtype=np.float32)
    scores = gemv.gemv(network.fc2, rectified.size, network.format, rectified)
    ids = np.flatnonzero(scores >= network.threshold)
    return (ids if ids.size else np.argmax(scores, keepdims=True)).astype(np.int32)
