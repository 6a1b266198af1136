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
from coldpress.runtime.decoder.router import Router
from coldpress.runtime.routing import Routing, held_shares

if TYPE_CHECKING:
    from torch import Tensor

    from coldpress.compiler.activity.taps import Change


@dataclass(frozen=True)
class Routed:
    """A pass of several variants."""

    hidden: "Tensor"
    """Hidden states after the last layer, [V * B, T, hidden_size]."""
    misses: np.ndarray
    """int64 [V, L]: units that tokens used and DRAM did not hold, over all blocks; 0 in layers without experts."""


@dataclass(frozen=True)
class CachedRouting:
    """A way of routing in the model of a pass, with the caches of one plan."""

    stream: LayerStream
    way: Routing
    cache_of: Callable[[int], CachePolicy]
    """Returns the cache of a layer's units with which every block begins."""

    def run(self, tokens: np.ndarray, strengths: np.ndarray) -> Routed:
        """Runs variants that prefer experts in DRAM by `strengths`, float64 [V, L], over token blocks, int [B, T]."""
        import torch

        hidden = torch.cat([self.stream.embed(tokens)] * len(strengths))
        misses = np.zeros(strengths.shape, np.int64)
        for layer in range(strengths.shape[1]):
            hidden, misses[:, layer] = self.run_layer(layer, hidden, strengths[:, layer])
        return Routed(hidden, misses)

    def run_layer(self, layer: int, hidden: "Tensor", strengths: np.ndarray) -> tuple["Tensor", np.ndarray]:
        """Runs one layer of the variants.

        Args:
            layer: Its number.
            hidden: The hidden states before it, [V * B, T, hidden_size].
            strengths: float64 [V].

        Returns:
            The hidden states after it, and the variants' misses, int64 [V].
        """
        if self.stream.spec.is_dense(layer):
            return self.stream.run_layer(layer, hidden), np.zeros(len(strengths), np.int64)
        per_variant = len(hidden) // len(strengths)
        cache, router = self.cache_of(layer), router_of(self.stream.model, layer)
        missed = np.zeros(len(hidden), np.int64)

        def hooks(block: int) -> Hooks:
            def seen(count: int) -> None:
                missed[block] = count

            strength = float(strengths[block // per_variant])
            return {"router_scores": self._change(copy.deepcopy(cache), router, strength, seen)}

        found = self.stream.run_layer(layer, hidden, hooks)
        return found, missed.reshape(len(strengths), per_variant).sum(axis=1)

    def _change(self, cache: CachePolicy, router: Router, strength: float, seen: Callable[[int], None]) -> "Change":
        """Returns a hook that routes the tokens of a block one after another, and tells how many units were missing."""

        def change(scores_TE: "Tensor") -> "Tensor":
            import torch

            own_TE = scores_TE.numpy()
            found_TE, missed = np.empty_like(own_TE), 0
            for token, scores_E in enumerate(own_TE):
                present = cache.present
                shares_E = held_shares(present, own_TE.shape[1])
                found_TE[token] = self.way.scores(scores_E[None], shares_E, strength)[0]
                used = of_experts(router.choose(found_TE[token : token + 1]), present.size)[0]
                ids = np.flatnonzero(used).astype(np.int32)
                missed += int(np.count_nonzero(~cache.serve(ids)))
            seen(missed)
            return torch.from_numpy(found_TE)

        return change
