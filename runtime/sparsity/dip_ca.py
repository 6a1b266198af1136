"""DIP-CA: dynamic input pruning that prefers units in DRAM (DIP 5.2, Eq. 10, Algorithm 1).

Reads the signals of `dip`, and which units the cache holds when a token reaches a layer: the magnitudes of all other
units are multiplied by `gamma` before the largest are chosen. With gamma = 1 this is `dip`; with gamma = 0 a token
prefers any non-zero unit in DRAM to a read. The paper uses 0.2 in all models and layers, tuned on validation text.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from coldpress.runtime.sparsity import Kept, Residency, dip
from coldpress.runtime.sparsity.topk import TopK

NEVER = 1e-200
"""Replaces gamma = 0: smaller than any ratio of two float32, yet it keeps the order among units not in DRAM."""


class Options(dip.Options):
    gamma: float = Field(
        default=0.2, ge=0, le=1, description="factor on the magnitude of what is not in DRAM (DIP Eq. 10)"
    )


class Plugin(dip.Dip[Options]):
    KEPT: ClassVar[Mapping[str, Kept]] = {**TopK.KEPT, "gamma": Kept("float32")}
    OPTIONS = Options
    SEES_RESIDENCY = True

    def fit(
        self, num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Options
    ) -> dict[str, np.ndarray]:
        """Computes `num_selected` int32 [1] and `gamma` float32 [1]."""
        arrays = super().fit(num_units, density, statistics, options)
        return arrays | {"gamma": np.array([options.gamma], np.float32)}

    def select(self, signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
        """Chooses the k largest scores of `signal` float32 [num_units]: ids, int32 [k] ascending. Eq. 10 also divides
        by the largest magnitude, so that one threshold serves all tokens; this does not change the k largest."""
        weight = np.where(residency.present, 1.0, max(float(arrays["gamma"][0]), NEVER))
        return super().select(np.abs(signal) * weight, arrays, residency)
