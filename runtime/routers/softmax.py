"""Experts by the largest logits, weighted by their softmax (Mixtral: Jiang et al. 2024, section 2.1).

Logits have the order of their softmax. With `router_normed` false the softmax is over all experts (Qwen). A token may
keep to the groups with the largest logits (DeepSeek-V2, section 2.2.2).
"""

import numpy as np

from coldpress.runtime.routers import Router


class Plugin(Router):
    GGUF = "SOFTMAX"

    def rank(self, logits_TE: np.ndarray) -> np.ndarray:
        return logits_TE

    def weigh(self, logits_TE: np.ndarray, chosen_TE: np.ndarray) -> np.ndarray:
        among_TE = chosen_TE if self._spec.router_normed else np.ones_like(chosen_TE)
        return np.where(chosen_TE, softmax(logits_TE, among_TE), np.float32(0))


def softmax(logits_TE: np.ndarray, among_TE: np.ndarray) -> np.ndarray:
    """Returns the softmax over the logits that `among_TE` marks, float32 [T, E], 0 for others."""
    most_T1 = np.where(among_TE, logits_TE, np.float32(-np.inf)).max(axis=1, keepdims=True)
    powers_TE = np.where(among_TE, np.exp(np.minimum(logits_TE - most_T1, 0)), np.float32(0))
    return powers_TE / powers_TE.sum(axis=1, keepdims=True)
