"""Runs variants of the source model side by side, each with units left out, and compares them with the whole model.

All variants share the reading of each layer. A variant that equals the first one up to some layer joins the pass there.
Memory holds a layer, the hidden states of all variants, and a block's logits for a part of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import HeadPart, Hooks, LayerStream

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Variant:
    choice: Choice
    families: tuple[str, ...]
    begins: int = 0
    """The first layer that differs from the first variant's."""


@dataclass(frozen=True)
class Differences:
    kld: np.ndarray
    """float64 [num_variants, num_blocks, T], nats: Kullback-Leibler divergence of next-token distributions."""
    nll: np.ndarray
    """float64 [num_variants, num_blocks, T - 1], nats: negative log likelihood of each token but the first."""
    whole_nll: np.ndarray
    """float64 [num_blocks, T - 1], that of the whole model."""

    @property
    def kld_sums(self) -> np.ndarray:
        """float64 [num_variants, num_blocks], the sums over tokens."""
        return self.kld.sum(axis=-1)


def last_hidden(stream: LayerStream, tokens: np.ndarray, variants: Sequence[Variant]) -> "Tensor":
    """Returns the variants' hidden states after the last layer, [num_variants * num_blocks, T, hidden_size], from token
    blocks, int [num_blocks, T]. The first variant begins at layer 0."""
    import torch

    order = sorted(range(len(variants)), key=lambda at: variants[at].begins)  # stable: the first variant stays first
    hidden, num_blocks = stream.embed(tokens), len(tokens)
    for layer in range(stream.spec.num_hidden_layers):
        running = [variants[at] for at in order if variants[at].begins <= layer]
        joining = len(running) - len(hidden) // num_blocks
        hidden = torch.cat([hidden, *[hidden[:num_blocks]] * joining])
        hidden = stream.run_layer(layer, hidden, _hooks(running, layer, num_blocks))
    by_variant = hidden.reshape(len(variants), num_blocks, *hidden.shape[1:])
    return by_variant[np.argsort(order).tolist()].reshape(hidden.shape)


def compare(
    stream: LayerStream, tokens: np.ndarray, whole: "Tensor", hidden: "Tensor", head: LayerStream | None = None
) -> Differences:
    """Compares next-token distributions on `tokens`, int [num_blocks, T]: those of `whole`, the whole model's hidden
    states after the last layer, [num_blocks, T, hidden_size], with those of all variants, as from `last_hidden`. The
    source's head gives logits; those of the variants come from `head`'s, if it is given."""
    import torch

    num_blocks, length = tokens.shape
    num_variants = len(hidden) // num_blocks
    targets = torch.from_numpy(np.asarray(tokens[:, 1:], np.int64))
    sums = _LogSums.empty(num_blocks, length)
    of_variants = [_LogSums.empty(num_blocks, length) for _ in range(num_variants)]
    # sums over the vocabulary of exp(logit - highest) of the whole model times the difference of the logits
    weighted = torch.zeros(num_variants, num_blocks, length, dtype=torch.float64)
    rows, other_rows = tee(stream.head_weights()) if head is None else (stream.head_weights(), head.head_weights())
    parts = zip(stream.head_parts(whole, rows), (head or stream).head_parts(hidden, other_rows), strict=True)
    for of_whole, of_hidden in parts:

        def run(block: int, of_whole: HeadPart = of_whole, of_hidden: HeadPart = of_hidden) -> None:
            expected = of_whole.logits(block).float()
            shrunk, shares = sums.add(block, expected, of_whole, targets[block])
            for number, own in enumerate(of_variants):
                found = of_hidden.logits(number * num_blocks + block).float()
                own.add(block, found, of_hidden, targets[block])
                lost = (shares * (expected - found)).sum(dim=-1, dtype=torch.float64)
                weighted[number, block] = weighted[number, block] * shrunk + lost

        stream.each(run, num_blocks)
    nll = np.zeros((num_variants, num_blocks, length - 1))
    kld = np.zeros((num_variants, num_blocks, length))
    for number, own in enumerate(of_variants):
        nll[number] = own.nll
        kld[number] = (weighted[number] / sums.exponentials + own.log - sums.log).numpy()
    return Differences(kld, nll, sums.nll)


@dataclass(frozen=True)
class _LogSums:
    """Sums over the vocabulary, added up a part of the head at a time; float64 [num_blocks, T]."""

    highest: "Tensor"
    exponentials: "Tensor"
    """Sums of exp(logit - highest)."""
    chosen: "Tensor"
    """Logits of the tokens that follow, [num_blocks, T - 1]."""

    @staticmethod
    def empty(num_blocks: int, length: int) -> "_LogSums":
        import torch

        zeros = torch.zeros(num_blocks, length, dtype=torch.float64)
        return _LogSums(torch.full_like(zeros, -torch.inf), zeros, torch.zeros_like(zeros[:, 1:]))

    def add(self, block: int, logits: "Tensor", part: HeadPart, targets: "Tensor") -> "tuple[Tensor, Tensor]":
        """Adds a part's logits, float32 [T, n]; returns the factor [T] by which earlier sums have become smaller, and
        exp(logit - highest), of the logits' shape."""
        import torch

        highest = torch.maximum(self.highest[block], logits.amax(dim=-1).double())
        shrunk = (self.highest[block] - highest).exp()
        own = (logits - highest.float()[:, None]).exp_()
        self.exponentials[block] = self.exponentials[block] * shrunk + own.sum(dim=-1, dtype=torch.float64)
        self.highest[block] = highest
        self.chosen[block] += part.chosen(logits[:-1], targets)
        return shrunk, own

    @property
    def log(self) -> "Tensor":
        return self.highest + self.exponentials.log()

    @property
    def nll(self) -> np.ndarray:
        return (self.log[:, :-1] - self.chosen).numpy()


def state_error(found: "Tensor", expected: "Tensor") -> float:
    """Returns the mean over tokens of the squared error over the squared state, both [num_blocks, T, hidden_size]."""
    both = (part.float().numpy().astype(np.float64) for part in (found - expected, expected))
    error, state = ((part**2).sum(axis=-1) for part in both)
    return float((error / np.maximum(state, np.finfo(np.float64).tiny)).mean())


def _hooks(running: Sequence[Variant], layer: int, num_blocks: int) -> Callable[[int], Hooks]:

    def of_block(block: int) -> Hooks:
        variant = running[block // num_blocks]
        return variant.choice.changes(layer, variant.families)

    return of_block
