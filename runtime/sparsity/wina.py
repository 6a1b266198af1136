"""WINA: the k units of largest |x| times the norm of their columns (weight-informed neuron activation, 2505.19427).

Reads the signals of top-k, and the Euclidean norm of each unit's weights in the source: a large input that multiplies
small weights is left out before a smaller input that multiplies large ones. If a unit has columns of several matrices,
the norm covers all of them.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from coldpress.runtime.sparsity import Kept, topk
from coldpress.schemas.errors import ColdpressError


class Plugin(topk.Plugin):
    CHOOSES = ("mlp_in", "mlp_mid", "attn_in", "attn_out")
    KEPT: ClassVar[Mapping[str, Kept]] = {**topk.TopK.KEPT, "unit_norms": Kept("float32", None)}

    def fit(
        self, num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: topk.Options
    ) -> dict[str, np.ndarray]:
        """Computes `num_selected` int32 [1] and `unit_norms` float32 [num_units]. Raises `ColdpressError` if
        `statistics` has no norms."""
        if "unit_norms" not in statistics:
            raise ColdpressError(
                "wina needs the norms of the source's weights, which an artifact of another method does not have; "
                "build with method=wina"
            )
        return super().fit(num_units, density, statistics, options) | {"unit_norms": statistics["unit_norms"]}

    def select_many(self, activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Marks the k largest scores of each token: float32 [T, num_units] -> bool [T, num_units]."""
        return super().select_many(activity * arrays["unit_norms"], arrays)
