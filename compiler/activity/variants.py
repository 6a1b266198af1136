"""Runs variants of the source model side by side, each with units left out, and compares them with the whole model.

All variants share the reading of each layer. A variant that equals the first one up to some layer joins the pass there.
Memory holds a layer, the hidden states of all variants, and the logits of a block for a few of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import Hooks, LayerStream

if TYPE_CHECKING:
    from torch import Tensor

MODELS_AT_A_TIME = 4
"""Models, of the whole one and its variants, whose logits are in memory at once, one block each."""


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
    kld_sums: np.ndarray
    """float64 [num_variants, num_blocks], the sums over tokens."""
    nll: np.ndarray
    """float64 [num_variants, num_blocks, T - 1], nats: negative log likelihood of each token but the first."""
    whole_nll: np.ndarray
    """float64 [num_blocks, T - 1], that of the whole model."""


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
    states = torch.cat([whole, hidden])  # the head is read once for the whole model and the first variants
    shape = (len(hidden) // num_blocks, num_blocks)
    kld, nll = np.zeros((*shape, length)), np.zeros((*shape, length - 1))
    kld_sums, whole_nll = np.zeros(shape), np.zeros((num_blocks, length - 1))
    for block in range(num_blocks):
        following = torch.from_numpy(np.asarray(tokens[block, 1:], np.int64))[:, None]
        expected = torch.empty(0)
        for start in range(0, 1 + len(kld), MODELS_AT_A_TIME):
            models = range(start, min(start + MODELS_AT_A_TIME, 1 + len(kld)))
            logits = (head or stream).head(states[[model * num_blocks + block for model in models]])
            if start == 0:
                of_whole = logits[0] if head is None else stream.head(whole[block : block + 1])[0]
                expected = torch.log_softmax(of_whole.float(), dim=-1)
                whole_nll[block] = -expected[:-1].gather(1, following)[:, 0].double().numpy()

            def one(
                index: int,
                first: int = max(start, 1),
                block: int = block,
                logits: "Tensor" = logits[start == 0 :],
                expected: "Tensor" = expected,
                following: "Tensor" = following,
            ) -> None:
                found, variant = torch.log_softmax(logits[index].float(), dim=-1), first - 1 + index
                of_token = (expected.exp() * (expected - found)).sum(dim=-1).double()
                kld[variant, block], kld_sums[variant, block] = of_token.numpy(), float(of_token.sum())
                nll[variant, block] = -found[:-1].gather(1, following)[:, 0].double().numpy()

            stream.each(one, len(models) - (start == 0))
    return Differences(kld, kld_sums, nll, whole_nll)


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
