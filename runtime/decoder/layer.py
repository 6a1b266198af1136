"""A decoder layer from top to bottom: attention, then the MLP; the loop that runtime/README.md explains.

Each of the two norms the hidden states, asks for the units of its families, multiplies by them as they arrive, and adds
its result to the hidden states. Where units come from is the caller's: a selector picks them and the store brings them
while tokens are decoded, or all stream from flash in order in a prefill. Shape letters: T tokens, N hidden_size, E
experts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coldpress.runtime.decoder.attention import Attention
from coldpress.runtime.decoder.blocks import Block
from coldpress.runtime.decoder.matrix import Norm, Resident, norm_of
from coldpress.runtime.decoder.mlp import Experts, Mlp
from coldpress.runtime.decoder.tokens import Tokens
from coldpress.runtime.store.facts import Key
from coldpress.schemas.families import FamilyName, layers_of
from coldpress.schemas.model import ModelSpec, placed_norms

UnitSource = Callable[[Key, np.ndarray, np.ndarray | None, Tokens], Iterator[Block]]
"""Yields a family's units in a layer as they come into memory. It gets the signal from which units are chosen, float32
[T, n], and the experts that each token uses, bool [T, E], or None."""


class Branch(NamedTuple):
    """A sublayer with its norms, whose result is added to the hidden states. The sublayer's `begin` takes the normed
    input, float32 [T, hidden_size], and returns work, which goes through `requests` in order: `signal`, then `add` for
    every block of units; after the last request `result`, float32 [T, hidden_size]."""

    sublayer: Attention | Mlp | Experts
    before: Norm | None
    after: Norm | None
    """Norms what the sublayer adds (OLMo 2, Gemma 2)."""


@dataclass(frozen=True)
class Layer:
    number: int
    mlp: Mlp | Experts
    branches: tuple[Branch, ...]
    """Attention, then the MLP."""
    parallel: bool
    """True if the MLP sees the layer's input, like attention, and not the hidden states after attention."""
    multiplier: float
    """Factor on what sublayers add."""

    @classmethod
    def of(cls, number: int, spec: ModelSpec, families: Sequence[FamilyName], resident: Resident) -> "Layer":
        """Takes the layer's resident tensors; raises `ArtifactError` if it cannot be computed from the families."""
        own = spec.of_layer(number)
        having = tuple(family for family in families if number in layers_of(family, spec))
        attention = Attention(number, spec, tuple(families), resident)
        mlp = (Experts if own.is_mixture else Mlp)(number, own, having, resident)
        branches = list[Branch]()
        for sublayer, names in zip((attention, mlp), placed_norms(spec), strict=True):
            before, after = (norm_of(f"layers.{number}.{name}", spec, resident) if name else None for name in names)
            branches.append(Branch(sublayer, before, after))
        return cls(number, mlp, tuple(branches), spec.residual != "sequential", spec.residual_multiplier)

    def forward(
        self, x_TN: np.ndarray, tokens: Tokens, units: UnitSource
    ) -> tuple[np.ndarray, dict[FamilyName, np.ndarray]]:
        """Takes hidden states through the layer; returns them, and the normed input of each family's sublayer."""
        inputs: dict[FamilyName, np.ndarray] = {}
        entering_TN = x_TN
        for sublayer, before, after in self.branches:
            h_TN = entering_TN if self.parallel else x_TN
            h_TN = h_TN if before is None else before.apply(h_TN)
            work = sublayer.begin(h_TN, tokens)
            for key in sublayer.requests:
                for block in units(key, work.signal(key), work.experts, tokens):
                    work.add(key, block)
                inputs[key[1]] = h_TN
            added = work.result() if after is None else after.apply(work.result())
            x_TN = x_TN + (added if self.multiplier == 1 else added * np.float32(self.multiplier))
        return x_TN, inputs
