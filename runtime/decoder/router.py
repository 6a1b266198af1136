"""The router of a mixture of experts: which experts a token uses, and by what weights their outputs are added.

Three steps, each a pure function of arrays: scores from the logits, experts from the scores, weights from both. The
logits are a resident matrix times the MLP's input. Mixtral takes the largest logits and their softmax (Jiang et al.
2024, section 2.1); DeepSeek-V3 takes sigmoids, and chooses after adding a correction to each, within the best groups of
experts (DeepSeek-AI 2024, sections 2.1.2 and 2.1.3). The compiler's forward pass uses the same class. Shape letters: T
tokens, E experts, G groups of experts.
"""

import numpy as np

from coldpress.runtime.decoder.arithmetic import sigmoid
from coldpress.runtime.largest import largest
from coldpress.schemas.model import ModelSpec

LEAST_SUM = np.float32(1e-20)
"""Added to the sum of sigmoids that weights are divided by, as transformers does."""


class Router:
    def __init__(self, spec: ModelSpec, correction: np.ndarray | None = None) -> None:
        """Takes the model's rules; `correction` float32 [E] is added to ranking scores, not to weights."""
        self._spec, self._correction = spec, correction

    def scores(self, logits_TE: np.ndarray) -> np.ndarray:
        """Returns the ranking scores, float32 [T, E], from float32 logits: the sigmoid, or the logit itself,
        which has the order of the softmax; plus the correction."""
        scores_TE = sigmoid(logits_TE) if self._spec.router_scores == "sigmoid" else logits_TE
        return scores_TE if self._correction is None else scores_TE + self._correction

    def choose(self, scores_TE: np.ndarray) -> np.ndarray:
        """Returns the experts that each token uses, bool [T, E]: those with the largest scores within the chosen
        groups; of equal ones the lower number."""
        return largest(self._within_groups(scores_TE), self._spec.num_experts_per_tok)

    def weights(self, logits_TE: np.ndarray, chosen_TE: np.ndarray) -> np.ndarray:
        """Returns the factors of the experts' outputs, float32 [T, E]: 0 for experts that a token does not use. They do
        not depend on how the experts were chosen, so another choice than `choose` may be weighed."""
        spec = self._spec
        if spec.router_scores == "sigmoid":
            weights_TE = np.where(chosen_TE, sigmoid(logits_TE), np.float32(0))
            if spec.router_normed:
                weights_TE /= weights_TE.sum(axis=1, keepdims=True) + LEAST_SUM
        else:
            among_TE = chosen_TE if spec.router_normed else np.ones_like(chosen_TE)
            weights_TE = np.where(chosen_TE, _softmax(logits_TE, among_TE), np.float32(0))
        return weights_TE * np.float32(spec.router_scaling)

    def _within_groups(self, scores_TE: np.ndarray) -> np.ndarray:
        """Returns the scores, minus infinity outside the chosen groups. Those are the groups with the largest sums of
        their two best sigmoids, or with the largest softmax (DeepSeek-V2, section 2.2.2)."""
        spec = self._spec
        if spec.num_expert_groups == 1:
            return scores_TE
        scores_TGE = scores_TE.reshape(len(scores_TE), spec.num_expert_groups, -1)
        num_best = 2 if spec.router_scores == "sigmoid" else 1
        best_TG = np.sort(scores_TGE, axis=2)[..., -num_best:].sum(axis=2)
        chosen_TG = largest(best_TG, spec.num_expert_groups_per_tok)
        return np.where(chosen_TG[..., None], scores_TGE, np.float32(-np.inf)).reshape(scores_TE.shape)


def _softmax(logits_TE: np.ndarray, among_TE: np.ndarray) -> np.ndarray:
    most_T1 = np.where(among_TE, logits_TE, np.float32(-np.inf)).max(axis=1, keepdims=True)
    powers_TE = np.where(among_TE, np.exp(np.minimum(logits_TE - most_T1, 0)), np.float32(0))
    return powers_TE / powers_TE.sum(axis=1, keepdims=True)
