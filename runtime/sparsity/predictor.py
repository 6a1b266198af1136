"""Predictor: the units that a small two-layer network expects to be active (LLM-in-a-flash 3.1 and B, PowerInfer 5.1).

Reads the MLP's input after its norm, before anything of the MLP is computed; scores = fc2 · relu(fc1 · x), and a unit
is used where its score reaches the layer's threshold. Scores come straight from the stored codes, sums are float32. A
layer without a predictor is one where nothing is left out: it uses all units. What a predictor aims at are the units
that are not zero or, in a model without exact zeros, the largest at a chosen density.
"""

from collections.abc import Mapping

import numpy as np

from runtime.kernels import gemv
from runtime.sparsity import DensitySource, ReadingOptions, Residency, topk
from schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = ("neuron",)
KEPT: Mapping[str, str] = {}
NEEDS_PREDICTORS = True
NEEDS_EXACT_ZEROS = False
EXACT = False
SEES_RESIDENCY = False
MISSED_SHARE = 0.1
"""The weakest of the active units are what is missed (LLM in a flash, Fig. 3a)."""


class Options(ReadingOptions):
    """None; how predictors are trained is the settings of `predict`."""


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """Whole neurons: nothing of them is known before they are read."""
    return ("neuron",)


def densities(exact_zeros: bool) -> DensitySource:
    """The density of what is to be predicted; a predictor uses more, because it must not miss much."""
    return "measured" if exact_zeros else "budget"


def fit(
    num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Options
) -> dict[str, np.ndarray]:
    """`num_selected` int32 [1], the units to aim at; nothing where zeros are exact, which calibration has then counted.

    The network itself, `fc1`, `fc2` and `threshold`, comes from predictors.safetensors.
    """
    return {} if "counts" in statistics else topk.fit(num_units, density, statistics, topk.Options())


def select(signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
    """Ids whose score reaches the threshold, int32 ascending; the best one alone where none does.

    Args:
        signal: The MLP's input, float32 [hidden_size].
        arrays: Codes `fc1` uint8 [rank, row_bytes] and `fc2` uint8 [num_units, row_bytes], `format`, `threshold`; or
            nothing.
        residency: Plays no part.
    """
    if "fc1" not in arrays:
        return np.arange(residency.present.size, dtype=np.int32)
    format_name = str(arrays["format"])
    inner = gemv.gemv(arrays["fc1"], signal.size, format_name, signal)
    rectified = np.maximum(inner, 0, dtype=np.float32)
    scores = gemv.gemv(arrays["fc2"], rectified.size, format_name, rectified)
    ids = np.flatnonzero(scores >= float(arrays["threshold"]))
    return (ids if ids.size else np.argmax(scores, keepdims=True)).astype(np.int32)


def select_many(activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a predictor aims at: the units that are not zero, or the largest; float32 [T, num_units] -> bool alike."""
    return topk.select_many(activity, arrays) if "num_selected" in arrays else activity != 0
