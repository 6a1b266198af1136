"""Predictor: the units that a small two-layer network expects to be active (LLM-in-a-flash 3.1 and B, PowerInfer 5.1).

Reads the MLP's input before any part of the MLP is computed; scores = fc2 · relu(fc1 · x). A token uses the units whose
scores reach the layer's threshold or, with `topk_ratio`, those with the largest scores (as in DejaVu: the same number
for every token). Products use the stored codes directly, sums are float32. A layer without a predictor uses all units.
Predictors are trained to find the units that are not zero or, in a model without exact zeros, the largest at a chosen
density. In a mixture of experts only the rows of fc2 that belong to the token's experts are multiplied.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from coldpress.runtime.arithmetic import largest
from coldpress.runtime.kernels import products
from coldpress.runtime.sparsity import DensitySource, Kept, ReadingOptions, Residency, Selector, topk
from coldpress.schemas.model import ModelSpec


class Options(ReadingOptions):
    topk_ratio: float = Field(
        default=0.0,
        ge=0,
        description="units that every token uses, those of the largest scores, over those that are active on average; "
        "0 takes whatever reaches the layer's threshold",
    )


class Plugin(Selector[Options]):
    CHOOSES = ("neuron",)
    KEPT: ClassVar[Mapping[str, Kept]] = {"num_selected": Kept("int32")}
    OPTIONS = Options
    NEEDS_PREDICTORS = True
    # assumed: LLM in a flash, Fig. 3a shows that a predictor misses the weakest units, not how many
    MISSED_SHARE = 0.1

    def families(self, spec: ModelSpec, options: Options) -> tuple[str, ...]:
        """Returns whole neurons, since a predictor decides before any part of them is read."""
        return ("neuron",)

    def densities(self, exact_zeros: bool) -> DensitySource:
        """Returns the source of the density to predict; a token uses more units, because it must not miss many."""
        return "measured" if exact_zeros else "budget"

    def fit(
        self, num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Options
    ) -> dict[str, np.ndarray]:
        """Computes `num_selected` int32 [1], the units of each token or 0 if the threshold decides; `aim` int32 [1].

        `aim` is the number of largest units that a predictor is trained to find. It is left out if zeros are exact,
        because calibration has counted them. The network itself, `fc1`, `fc2` and `threshold`, comes from
        predictors.safetensors.
        """
        ratio = options.topk_ratio
        selected = topk.num_selected(num_units, min(1.0, ratio * density)) if ratio else 0
        aim = {} if "counts" in statistics else {"aim": np.array([topk.num_selected(num_units, density)], np.int32)}
        return {"num_selected": np.array([selected], np.int32), **aim}

    def select(self, signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
        return self.select_among(signal, arrays, residency, None)

    def select_among(
        self, signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency, experts: np.ndarray | None
    ) -> np.ndarray:
        """Chooses ids by scores among the units of the token's experts, int32 ascending.

        Args:
            signal: The MLP's input, float32 [hidden_size].
            arrays: The arrays from `fit`; codes `fc1` uint8 [rank, row_bytes] and `fc2` uint8 [num_units, row_bytes],
                `format` and `threshold`, or none of these four: then all units are used, as many as `residency` has.
            experts: bool [num_experts], None without experts; all have the same number of units, stored expert by
                expert.
        """
        experts = np.ones(1, bool) if experts is None else experts
        width = (len(arrays["fc2"]) if "fc2" in arrays else residency.present.size) // experts.size
        starts = width * np.flatnonzero(experts)
        ids = (starts[:, None] + np.arange(width)).ravel().astype(np.int32)
        if "fc1" not in arrays or not ids.size:
            return ids
        format_name, fc2 = str(arrays["format"]), arrays["fc2"]
        inner = products.gemv(arrays["fc1"], signal.size, format_name, signal)
        rectified = np.maximum(inner, 0, dtype=np.float32)
        parts = [products.gemv(fc2[start : start + width], rectified.size, format_name, rectified) for start in starts]
        return ids[self.by_scores(np.concatenate(parts)[None], arrays)[0]]

    def select_many(self, activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the training target, non-zero units or the `aim` largest: float32 [T, num_units] -> bool."""
        return largest(np.abs(activity), int(arrays["aim"][0])) if "aim" in arrays else activity != 0

    def by_scores(self, scores: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Chooses units by scores: float32 [T, n] -> bool [T, n]. Takes the `num_selected` largest if that is above 0;
        else all that reach the `threshold`, or if none does, only the best one."""
        count = int(arrays["num_selected"][0])
        if count > 0:
            return largest(scores, count)
        chosen = scores >= float(arrays["threshold"])
        none = np.flatnonzero(~chosen.any(axis=1))
        chosen[none, np.argmax(scores[none], axis=1)] = True
        return chosen
