"""Measures the loss that densities cause: the source model's divergence from itself, with the build's own selector.

The loss is the Kullback-Leibler divergence of next-token distributions in nats per token
(compiler/stages/verify/divergence.py measures the artifact's). All variants run in one pass: a variant that equals the
first one up to some layer joins the pass there, so each layer is read once. Memory holds a layer, the hidden states of
all variants, and the logits of a block for a few of them. Answers are saved in the stage's folder, so that an
interrupted run can resume.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import Hooks, LayerStream
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages.allocate._task import Key, Shares
from coldpress.runtime.sparsity import Selector

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS_AT_A_TIME = 4
"""Variants whose logits are in memory at once, one block each."""
Fit = Callable[[Key, float], Mapping[str, np.ndarray]]
"""(layer and family, density) -> the selector's arrays."""


@dataclass
class _Text:
    """Token blocks, and the whole model's hidden states for them."""

    tokens: np.ndarray
    """int [num_blocks, T]."""
    whole: "Tensor | None" = None
    """Hidden states after the last layer, [num_blocks, T, hidden_size]; None until they are needed."""


class MeasuredLosses:
    """See `Losses` (compiler/stages/allocate/_task.py)."""

    def __init__(
        self,
        stream: LayerStream,
        selector: Selector[Any],
        fit: Fit,
        calibration: np.ndarray,
        validation: np.ndarray,
        work: Workspace,
    ) -> None:
        """Runs nothing yet.

        Args:
            stream: The source.
            selector: The build's selector.
            fit: Returns the selector's arrays for one family of one layer at a density.
            calibration: Token blocks int [num_blocks, T] that `of` measures on.
            validation: Other blocks, that `on_validation` measures on.
            work: The stage's folder.
        """
        self._stream, self._selector, self._fit, self._work = stream, selector, fit, work
        self._calibration, self._validation = _Text(calibration), _Text(validation)
        self._num_asked = 0

    def of(self, variants: Sequence[Shares]) -> list[float]:
        """Returns divergences on calibration text."""
        return self._answered(self._calibration, variants)

    def on_validation(self, shares: Shares) -> float:
        """Returns the divergence on validation text."""
        return self._answered(self._validation, [shares])[0]

    def _answered(self, text: _Text, variants: Sequence[Shares]) -> list[float]:
        """Returns divergences, saved under a running number: equal inputs ask the same questions in the same order."""
        self._num_asked += 1
        key = f"losses-{self._num_asked}"
        kept = self._work.once(key, lambda: {"nats": self._measured(text, variants)})
        return load_arrays(kept)["nats"].tolist()

    def _measured(self, text: _Text, variants: Sequence[Shares]) -> np.ndarray:
        """Returns the divergence of each variant, float64 [num_variants]."""
        import torch

        # variants share most of their densities, so each is fitted once
        asked = dict.fromkeys((key, share) for variant in variants for key, share in variant.items())
        fitted = {(key, share): self._fit(key, share) for key, share in asked}
        choices = [
            Choice(self._selector, {key: fitted[key, share] for key, share in variant.items()}, self._stream.spec)
            for variant in variants
        ]
        families = tuple(dict.fromkeys(family for _, family in variants[0]))
        begins = [0, *(_first_difference(variants[0], variant) for variant in variants[1:])]
        order = sorted(range(len(variants)), key=lambda at: begins[at])  # a stable sort: the first variant stays first
        hidden, num_blocks = self._stream.embed(text.tokens), len(text.tokens)
        for layer in range(self._stream.spec.num_hidden_layers):
            running = [choices[at] for at in order if begins[at] <= layer]
            joining = len(running) - len(hidden) // num_blocks
            hidden = torch.cat([hidden, *[hidden[:num_blocks]] * joining])
            hidden = self._stream.run_layer(layer, hidden, _choosing(running, layer, families, num_blocks))
        found = np.zeros(len(variants))
        found[order] = self._divergences(text, hidden)
        return found

    def _divergences(self, text: _Text, hidden: "Tensor") -> np.ndarray:
        """Returns each variant's divergence, float64 [num_variants], from hidden states [num_variants * num_blocks, T,
        hidden_size]."""
        import torch

        num_blocks = len(text.tokens)
        if text.whole is None:
            text.whole = self._stream.last_hidden(text.tokens)
        found = np.zeros((len(hidden) // num_blocks, num_blocks))
        for block in range(num_blocks):
            expected = torch.log_softmax(self._stream.head(text.whole[block : block + 1])[0].float(), dim=-1)
            for start in range(0, len(found), VARIANTS_AT_A_TIME):
                rows = range(start, min(start + VARIANTS_AT_A_TIME, len(found)))
                logits = self._stream.head(hidden[[row * num_blocks + block for row in rows]])
                found[rows.start : rows.stop, block] = self._from(expected, logits)
        return found.sum(axis=1) / text.tokens.size

    def _from(self, expected: "Tensor", logits: "Tensor") -> np.ndarray:
        """Returns sums over tokens, float64 [n], from log probabilities [T, vocab_size] and logits [n, T,
        vocab_size]."""
        import torch

        sums = np.zeros(len(logits))

        def one(index: int) -> None:
            differs = expected - torch.log_softmax(logits[index].float(), dim=-1)
            sums[index] = float((expected.exp() * differs).sum(dim=-1).double().sum())

        self._stream.each(one, len(logits))
        return sums


def _first_difference(one: Shares, other: Shares) -> int:
    """Returns the first layer that differs; 0 if none does."""
    return min((key[0] for key, share in other.items() if share != one[key]), default=0)


def _choosing(running: list[Choice], layer: int, families: tuple[str, ...], num_blocks: int) -> Callable[[int], Hooks]:
    """Returns the hooks of each block; every running variant has `num_blocks` blocks."""
    return lambda block: running[block // num_blocks].changes(layer, families)
