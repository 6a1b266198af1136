"""Runs the source model with routers that see which experts are in DRAM, token by token.

The caches are a plan's, and the choice is the runtime's (runtime/routing): what a token chooses depends on what earlier
tokens of its block left in DRAM. All variants of a pass share the reading of each layer. Shape letters: V variants, B
blocks, L layers, T tokens, E experts.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.activity.choice import of_experts
from coldpress.compiler.activity.forward import Hooks, LayerStream
from coldpress.compiler.activity.routing import router_of
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.routers import Router
from coldpress.runtime.routing import Routing, held_shares

if TYPE_CHECKING:
    from torch import Tensor


def routed(
    way: Routing, router: Router, scores_E: np.ndarray, present: np.ndarray, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Routes one token by its router's own scores, float32 [E], with the units `present` in DRAM, bool [num_units].
    Returns the scores that experts are chosen by, float32 [E], and the units of the chosen ones, int32 ascending."""
    found_1E = way.scores(scores_E[None], held_shares(present, scores_E.size), strength)
    used = of_experts(router.choose(found_1E), present.size)[0]
    return found_1E[0], np.flatnonzero(used).astype(np.int32)


@dataclass(frozen=True)
class CachedRouting:
    """A way of routing in the model of a pass, with the caches of one plan."""

    stream: LayerStream
    way: Routing
    cache_of: Callable[[int], CachePolicy]
    """Returns the cache of a layer's units with which every block begins."""

    def run(self, tokens: np.ndarray, strengths: np.ndarray) -> tuple["Tensor", np.ndarray]:
        """Runs variants that prefer experts in DRAM by `strengths`, float64 [V, L], over token blocks, int [B, T].
        Returns the hidden states after the last layer, [V * B, T, hidden_size], and how many used units DRAM did not
        hold, over all blocks, int64 [V, L]; 0 in layers without experts."""
        import torch

        hidden = torch.cat([self.stream.embed(tokens)] * len(strengths))
        misses = np.zeros(strengths.shape, np.int64)
        for layer in range(strengths.shape[1]):
            hidden, misses[:, layer] = self.run_layer(layer, hidden, strengths[:, layer])
        return hidden, misses

    def run_layer(self, layer: int, hidden: "Tensor", strengths: np.ndarray) -> tuple["Tensor", np.ndarray]:
        """Runs one layer of the variants on `hidden`, [V * B, T, hidden_size], with `strengths`, float64 [V]; returns
        the hidden states after it, and the variants' misses, int64 [V]."""
        import torch

        if self.stream.spec.is_dense(layer):
            return self.stream.run_layer(layer, hidden), np.zeros(len(strengths), np.int64)
        per_variant = len(hidden) // len(strengths)
        cache, router = self.cache_of(layer), router_of(self.stream.model, layer)
        missed = np.zeros(len(hidden), np.int64)

        def hooks(block: int) -> Hooks:
            held, strength = copy.deepcopy(cache), float(strengths[block // per_variant])

            def change(scores_TE: "Tensor") -> "Tensor":
                own_TE = scores_TE.numpy()
                found_TE = np.empty_like(own_TE)
                for token, scores_E in enumerate(own_TE):
                    found_TE[token], ids = routed(self.way, router, scores_E, held.present, strength)
                    missed[block] += np.count_nonzero(~held.serve(ids))
                return torch.from_numpy(found_TE)

            return {"router_scores": change}

        found = self.stream.run_layer(layer, hidden, hooks)
        return found, missed.reshape(len(strengths), per_variant).sum(axis=1)
