"""Routers: which experts of a mixture a token uses, and by what weights their outputs are added. One file per router.

Three steps, each a pure function of arrays: scores from the logits, experts from the scores, weights from both. The
logits are a resident matrix times the MLP's input. The compiler's forward pass uses the same class. A file has one
class `Plugin`, which extends `Router`; `ModelSpec.router_scores` names it. Its own settings are the fields of its
`OPTIONS`, with the names of config.json's keys, from which they are read. Shape letters: T tokens, E experts, G groups
of experts.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from coldpress.runtime.arithmetic import largest
from coldpress.runtime.plugins import PluginBase, load_class, options_of
from coldpress.schemas.model import ModelSpec

PACKAGE = "coldpress.runtime.routers"


class Router(PluginBase):
    """A layer's router. The base class of all routers."""

    NUM_BEST: ClassVar[int] = 1
    """The best scores of a group of experts whose sum decides whether a token may use the group."""
    GGUF: ClassVar[str | None] = None
    """The name of its scores in GGUF files; None: llama.cpp has no such router."""

    def __init__(self, spec: ModelSpec, correction: np.ndarray | None = None) -> None:
        """Takes the model's rules; `correction` float32 [E] is added to ranking scores, not to weights."""
        self._spec, self._correction = spec, correction
        self._options: Any = options_of(self, spec.router_options)

    @classmethod
    def flaw(cls, spec: ModelSpec) -> tuple[str, str] | None:
        """Returns a field of the spec that makes no sense and what was expected: groups have equally many experts, from
        which a token can take its own."""
        experts, groups, chosen = spec.num_experts, spec.num_expert_groups, spec.num_expert_groups_per_tok
        if spec.num_experts_per_tok > experts:
            return "num_experts_per_tok", f"at most {experts} experts"
        if experts % groups:
            return "num_expert_groups", f"a divisor of {experts} experts"
        if groups > 1 and cls.NUM_BEST * groups > experts:
            return "num_expert_groups", f"groups of at least {cls.NUM_BEST} experts"
        if chosen > groups:
            return "num_expert_groups_per_tok", f"at most {groups}, the number of groups"
        if spec.num_experts_per_tok > chosen * (experts // groups):
            return "num_experts_per_tok", f"at most {chosen * (experts // groups)}, the experts of its groups"
        return None

    def scores(self, logits_TE: np.ndarray) -> np.ndarray:
        """Returns the ranking scores, float32 [T, E], from float32 logits, plus the correction."""
        scores_TE = self.rank(logits_TE)
        return scores_TE if self._correction is None else scores_TE + self._correction

    def choose(self, scores_TE: np.ndarray) -> np.ndarray:
        """Returns the experts that each token uses, bool [T, E]: those with the largest scores within the chosen
        groups; of equal ones the lower number."""
        return largest(self._within_groups(scores_TE), self._spec.num_experts_per_tok)

    def weights(self, logits_TE: np.ndarray, chosen_TE: np.ndarray) -> np.ndarray:
        """Returns the factors of the experts' outputs, float32 [T, E]: 0 for experts that a token does not use. They do
        not depend on how the experts were chosen, so another choice than `choose` may be weighed."""
        return self.weigh(logits_TE, chosen_TE) * np.float32(self._spec.router_scaling)

    @abstractmethod
    def rank(self, logits_TE: np.ndarray) -> np.ndarray:
        """Returns the scores by which experts are compared, float32 [T, E]."""

    @abstractmethod
    def weigh(self, logits_TE: np.ndarray, chosen_TE: np.ndarray) -> np.ndarray:
        """Returns the weights of the chosen experts, float32 [T, E], 0 for others, before `router_scaling`."""

    def _within_groups(self, scores_TE: np.ndarray) -> np.ndarray:
        """Returns the scores, minus infinity outside the chosen groups: those with the largest sums of their best
        scores."""
        spec = self._spec
        if spec.num_expert_groups == 1:
            return scores_TE
        scores_TGE = scores_TE.reshape(len(scores_TE), spec.num_expert_groups, -1)
        best_TG = np.sort(scores_TGE, axis=2)[..., -self.NUM_BEST :].sum(axis=2)
        chosen_TG = largest(best_TG, spec.num_expert_groups_per_tok)
        return np.where(chosen_TG[..., None], scores_TGE, np.float32(-np.inf)).reshape(scores_TE.shape)


def router_class(spec: ModelSpec) -> type[Router]:
    """Raises `UnknownNameError` if there is no such router, and `ColdpressError` if it has no such setting, or a
    setting has another value than it may have."""
    found = load_class(PACKAGE, Router, spec.router_scores)
    options_of(found, spec.router_options)
    return found


def router_of(spec: ModelSpec, correction: np.ndarray | None = None) -> Router:
    """Returns the router of a layer, with its correction. Raises as `router_class`."""
    return router_class(spec)(spec, correction)
