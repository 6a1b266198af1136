"""Predictor: the units that a small two-layer network expects to be active (LLM-in-a-flash 3.1 and B, PowerInfer 5.1).

Reads the MLP's input after its norm, before anything of the MLP is computed; scores = fc2 · relu(fc1 · x), and a unit
is used where its score reaches the layer's threshold or, with `topk_ratio`, where it is among each token's largest
(DejaVu's form: as many units for every token). Scores come straight from the stored codes, sums are float32. A layer
without a predictor is one where nothing is left out: it uses all units. What a predictor aims at are the units that are
not zero or, in a model without exact zeros, the largest at a chosen density. In a mixture of experts all of this is of
the units of those experts that the token uses: only their rows of fc2 are multiplied.
"""

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from coldpress.runtime.kernels import gemv
from coldpress.runtime.sparsity import DensitySource, Kept, ReadingOptions, Residency, topk
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = ("neuron",)
KEPT: Mapping[str, Kept] = {"num_selected": Kept("int32")}
NEEDS_PREDICTORS = True
NEEDS_EXACT_ZEROS = False
EXACT = False
SEES_RESIDENCY = False
MISSED_SHARE = 0.1
"""Share of the active units that a predictor is assumed to miss, the weakest ones; LLM in a flash, Fig. 3a shows that
misses are weak, but not how many there are."""


class Options(ReadingOptions):
    """How scores decide; how predictors are trained is the settings of `predict`."""

    topk_ratio: float = Field(
        default=0.0,
        ge=0,
        description="units that every token uses, those of the largest scores, over those that are active on average; "
        "0 takes whatever reaches the layer's threshold",
    )


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """Whole neurons: nothing of them is known before they are read."""
    return ("neuron",)


def densities(exact_zeros: bool) -> DensitySource:
    """The density of what is to be predicted; a predictor uses more, because it must not miss much."""
    return "measured" if exact_zeros else "budget"


def fit(
    num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Options
) -> dict[str, np.ndarray]:
    """`num_selected` int32 [1], the units of each token or 0 where the threshold decides; `aim` int32 [1], of the best.

    There is no aim where zeros are exact, which calibration has then counted. The network itself, `fc1`, `fc2` and
    `threshold`, comes from predictors.safetensors.
    """
    ratio = options.topk_ratio
    selected = topk.num_selected(num_units, min(1.0, ratio * density)) if ratio else 0
    aim = {} if "counts" in statistics else {"aim": np.array([topk.num_selected(num_units, density)], np.int32)}
    return {"num_selected": np.array([selected], np.int32), **aim}


def select(
    signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency, experts: np.ndarray | None = None
) -> np.ndarray:
    """Ids that the scores choose, int32 ascending.

    Args:
        signal: The MLP's input, float32 [hidden_size].
        arrays: Of `fit`; codes `fc1` uint8 [rank, row_bytes] and `fc2` uint8 [num_units, row_bytes], `format` and
            `threshold`, or none of these four.
        residency: Of a layer without a predictor says how many units there are; plays no other part.
        experts: bool [E], those whose units the token uses, each as many, one expert's after another's; None for all.
    """
    own = np.ones(1, bool) if experts is None else experts
    width = (len(arrays["fc2"]) if "fc2" in arrays else residency.present.size) // own.size
    starts = width * np.flatnonzero(own)
    ids = (starts[:, None] + np.arange(width)).ravel().astype(np.int32)
    if "fc1" not in arrays or not ids.size:
        return ids
    format_name, fc2 = str(arrays["format"]), arrays["fc2"]
    inner = gemv.gemv(arrays["fc1"], signal.size, format_name, signal)
    rectified = np.maximum(inner, 0, dtype=np.float32)
    parts = [gemv.gemv(fc2[start : start + width], rectified.size, format_name, rectified) for start in starts]
    return ids[by_scores(np.concatenate(parts)[None], arrays)[0]]


def by_scores(scores: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The units that scores float32 [T, n] choose, bool alike: the `num_selected` largest, else all that reach the
    `threshold`, else the best one alone. Scores are of all units that a token may use, and of no others."""
    count = int(arrays["num_selected"][0])
    if count > 0:
        return topk.largest(scores, count)
    chosen = scores >= float(arrays["threshold"])
    none = np.flatnonzero(~chosen.any(axis=1))
    chosen[none, np.argmax(scores[none], axis=1)] = True
    return chosen


def select_many(activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a predictor aims at: the units that are not zero, or the largest; float32 [T, num_units] -> bool alike."""
    return topk.largest(np.abs(activity), int(arrays["aim"][0])) if "aim" in arrays else activity != 0
