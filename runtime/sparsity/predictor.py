"""Predictor: the units that a small two-layer network expects to be active (LLM-in-a-flash 3.1 and B, PowerInfer 5.1).

Reads the MLP's input after its norm, before anything of the MLP is computed; scores = fc2 · relu(fc1 · x), and a unit
is used where its score reaches the layer's threshold. Weights are fp16, sums are float32.
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
class Parameters:
    """`fc1` float16 [rank, hidden_size], `fc2` float16 [num_units, rank], and the score from which a unit is used."""

    fc1: np.ndarray
    fc2: np.ndarray
    threshold: float


def fit(num_units: int, density: float, arrays: Mapping[str, np.ndarray]) -> Parameters:
    """The predictor with its threshold.

    Args:
        num_units: Units of the family.
        density: Mean share of units to select; used only where `arrays` has no threshold.
        arrays: `fc1`, `fc2` as in `Parameters`, and either `threshold` float32 [] or `inputs` float16 or float32
            [num_tokens, hidden_size], from whose scores the threshold is taken: their (1 - density) quantile.
    """
    fc1 = np.ascontiguousarray(arrays["fc1"], np.float16)
    fc2 = np.ascontiguousarray(arrays["fc2"], np.float16)
    if "threshold" in arrays:
        return Parameters(fc1, fc2, float(arrays["threshold"]))
    scores = np.stack([_scores(inputs.astype(np.float32), fc1, fc2) for inputs in arrays["inputs"]]).ravel()
    num_selected = min(scores.size, max(1, round(density * scores.size)))
    position = scores.size - num_selected
    return Parameters(fc1, fc2, float(np.partition(scores, position)[position]))


def select(signal: np.ndarray, parameters: Parameters, cached: np.ndarray) -> np.ndarray:
    """Ids whose score reaches the threshold, int32 ascending; the best one alone where none does.

    Args:
        signal: The MLP's input, float32 [hidden_size].
        parameters: From `fit`.
        cached: Plays no part.
    """
    scores = _scores(signal, parameters.fc1, parameters.fc2)
    ids = np.flatnonzero(scores >= parameters.threshold)
    return (ids if ids.size else np.argmax(scores, keepdims=True)).astype(np.int32)


def _scores(inputs: np.ndarray, fc1: np.ndarray, fc2: np.ndarray) -> np.ndarray:
    inner = gemv.gemv(fc1.view(np.uint8), fc1.shape[1], "fp16", inputs)
    return gemv.gemv(fc2.view(np.uint8), fc2.shape[1], "fp16", np.maximum(inner, 0, dtype=np.float32))
