"""Experts by sigmoids of the logits, which also weigh them (DeepSeek-V3, GLM-4.5: DeepSeek-AI 2024, sections 2.1.2 and
2.1.3).

A correction may be added to each sigmoid for the choice alone. A token may keep to the groups whose two best sigmoids
have the largest sums.
"""

import numpy as np

from coldpress.runtime.arithmetic import sigmoid
from coldpress.runtime.routers import Router

LEAST_SUM = np.float32(1e-20)
"""Added to the sum of sigmoids that weights are divided by, as transformers does."""


class Plugin(Router):
    NUM_BEST = 2
    GGUF = "SIGMOID"

    def rank(self, logits_TE: np.ndarray) -> np.ndarray:
        return sigmoid(logits_TE)

    def weigh(self, logits_TE: np.ndarray, chosen_TE: np.ndarray) -> np.ndarray:
        weights_TE = np.where(chosen_TE, sigmoid(logits_TE), np.float32(0))
        if self._spec.router_normed:
            weights_TE /= weights_TE.sum(axis=1, keepdims=True) + LEAST_SUM
        return weights_TE
