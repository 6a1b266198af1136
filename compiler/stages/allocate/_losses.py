"""Measures the loss that densities cause: the source model's divergence from itself, with the build's own selector.

The loss is the Kullback-Leibler divergence of next-token distributions in nats per token
(compiler/stages/verify/divergence.py measures the artifact's). All variants run in one pass
(compiler/activity/variants.py). Answers are saved in the stage's folder, so that an interrupted run can resume.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.variants import Variant, compare, last_hidden
from coldpress.compiler.io import Workspace, digest, load_arrays
from coldpress.compiler.stages.allocate._task import Key, Shares
from coldpress.runtime.sparsity import Selector

if TYPE_CHECKING:
    from torch import Tensor

Fit = Callable[[Key, float], Mapping[str, np.ndarray]]
"""(layer and family, density) -> the selector's arrays."""


@dataclass
class _Text:
    name: str
    tokens: np.ndarray
    """int [num_blocks, T]."""
    whole: "Tensor | None" = None
    """Hidden states after the last layer, [num_blocks, T, hidden_size]; None until they are needed."""


class MeasuredLosses:
    def __init__(
        self,
        stream: LayerStream,
        selector: Selector[Any],
        fit: Fit,
        calibration: np.ndarray,
        validation: np.ndarray,
        work: Workspace,
    ) -> None:
        """Runs nothing yet. Blocks of tokens are int [num_blocks, T]: `calibration` for `of`, `validation` for
        `on_validation`."""
        self._stream, self._selector, self._fit, self._work = stream, selector, fit, work
        self._calibration, self._validation = _Text("calibration", calibration), _Text("validation", validation)

    def of(self, variants: Sequence[Shares]) -> list[float]:
        return self._answered(self._calibration, variants)

    def on_validation(self, shares: Shares) -> float:
        return self._answered(self._validation, [shares])[0]

    def _answered(self, text: _Text, variants: Sequence[Shares]) -> list[float]:
        """Returns divergences, saved under the question: a build's other budgets ask others, in the same folder."""
        question = (json.dumps(sorted([*key, share] for key, share in variant.items())) for variant in variants)
        key = f"losses-{digest(text.name, *question)[:16]}"
        kept = self._work.once(key, lambda: {"nats": self._measured(text, variants)})
        return load_arrays(kept)["nats"].tolist()

    def _measured(self, text: _Text, variants: Sequence[Shares]) -> np.ndarray:
        """Returns the divergence of each variant, float64 [num_variants]."""
        # variants share most of their densities, so each is fitted once
        asked = dict.fromkeys((key, share) for variant in variants for key, share in variant.items())
        fitted = {(key, share): self._fit(key, share) for key, share in asked}
        families = tuple(dict.fromkeys(family for _, family in variants[0]))

        def choice(variant: Shares) -> Choice:
            arrays = {key: fitted[key, share] for key, share in variant.items()}
            return Choice(self._selector, arrays, self._stream.spec)

        running = [
            Variant(choice(variant), families, _first_difference(variants[0], variant) if number else 0)
            for number, variant in enumerate(variants)
        ]
        if text.whole is None:
            text.whole = self._stream.last_hidden(text.tokens)
        hidden = last_hidden(self._stream, text.tokens, running)
        return compare(self._stream, text.tokens, text.whole, hidden).kld_sums.sum(axis=1) / text.tokens.size


def _first_difference(one: Shares, other: Shares) -> int:
    """Returns the first layer that differs; 0 if none does."""
    return min((key[0] for key, share in other.items() if share != one[key]), default=0)
