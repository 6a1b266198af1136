"""Threshold: the units whose |signal| reaches the threshold of their layer and family (TEAL; DIP 3.1, "per layer").

Reads the same signals as top-k. The threshold comes from the magnitudes that calibration counted in the dense model, so
one pass over the text serves every density. A token uses all units that reach the threshold; the density is an average
over a text. If no unit reaches it, the token uses the unit with the largest |signal| (unit 0 if all are zero), so that
the choice is never empty.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from coldpress.runtime.sparsity import Kept, OptionsT, Selector, topk
from coldpress.runtime.sparsity._magnitudes import threshold
from coldpress.schemas.model import ModelSpec


class Threshold(Selector[OptionsT]):
    CHOOSES = topk.TopK.CHOOSES
    KEPT: ClassVar[Mapping[str, Kept]] = {"threshold": Kept("float32")}

    def fit(
        self, num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: OptionsT
    ) -> dict[str, np.ndarray]:
        """Computes `threshold` float32 [1]. Raises `ColdpressError` if `statistics` has no magnitudes."""
        return {"threshold": np.array([threshold(statistics, density)], np.float32)}

    def select_many(self, activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Marks where |activity| reaches the threshold, or else the largest: float32 [T, num_units] -> bool."""
        magnitude = np.abs(activity)
        chosen = magnitude >= arrays["threshold"][0]
        empty = np.flatnonzero(~chosen.any(axis=1))
        chosen[empty, magnitude[empty].argmax(axis=1)] = True
        return chosen


class Plugin(Threshold[topk.Options]):
    OPTIONS = topk.Options

    def families(self, spec: ModelSpec, options: topk.Options) -> tuple[str, ...]:
        return topk.linear_inputs(options)
