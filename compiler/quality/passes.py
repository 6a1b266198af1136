"""Runs changed models over a text and compares them with the whole model, one file for each pass.

A text of fewer than eight blocks is cut into at least eight parts, over which standard errors are taken.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.activity.calibration_pass import ComputeConfig, stream_of
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.gram_pass import add_grams
from coldpress.compiler.activity.rounded import Rounded, RoundedHead, RoundedKeys
from coldpress.compiler.activity.variants import Differences, Variant, compare, last_hidden
from coldpress.compiler.block_statistics import perplexity, standard_error
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.kept_codes import keeping
from coldpress.compiler.quality.variants import STRENGTHS, Along, AlongStrengths, reached, variants
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.compiler.rounding._weights import Algorithm
from coldpress.compiler.shared_settings import ExploreSetting
from coldpress.compiler.steps import Steps
from coldpress.runtime.plugins import load
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import Options
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curve, FormatLoss, HeadLoss, KvCacheLoss, Point, RoutedPoint, RoutingCurve
from coldpress.schemas.families import FamilyName, FormatName, Formats, kept_of, of_layers
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.model import Model, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

LOG = logging.getLogger(__name__)
RARE = 99.9
"""Percentile of the divergence that stands for the worst tokens."""
LEAST_PARTS = 8
"""Parts of a text that a standard error is taken over: that of two blocks is often a quarter of what it should be."""


Hidden = Callable[[np.ndarray, "Tensor"], "Tensor"]
"""Returns a changed model's hidden states, from tokens, int [num_blocks, T], and the whole model's hidden states. Both
states are those after the last layer, [num_blocks, T, hidden_size]."""
NO_LOSS = {"mean_kld": 0.0, "mean_kld_error": 0.0, "p999_kld": 0.0, "ppl_ratio": 1.0, "ppl_ratio_error": 0.0}
"""The loss of a model whose matrices keep the source's codes."""


class PassesConfig(ComputeConfig, ExploreSetting):
    """Settings of passes: arithmetic, text, and how codes are chosen."""


@dataclass(frozen=True)
class Passes:
    stage: str
    stream: LayerStream
    tokens: np.ndarray
    """int [num_blocks, T]."""
    whole: "Tensor"
    """The whole model's hidden states after the last layer."""
    work: Workspace
    steps: Steps
    rounding: Rounding
    begun: "Passes | None" = None
    """Passes over the first blocks of the text, which need not run again."""

    def extended(self, tokens: np.ndarray, work: Workspace) -> "Passes":
        """Returns passes over a text, int [num_blocks, T], that begins with the blocks of this one; not for variants
        that depend on earlier blocks, such as those with a cache in the loop."""
        import torch

        rest = self.stream.last_hidden(tokens[len(self.tokens) :])
        return replace(self, tokens=tokens, whole=torch.cat([self.whole, rest]), work=work, begun=self)

    def differences(self, title: str, hidden: Hidden, head: LayerStream | None = None) -> Differences:
        """Returns a pass's measurements, which an interrupted run may have left; `head` None is the source's."""
        found = self._differences(title, hidden, head)
        self.steps.add()
        return found

    def _differences(self, title: str, hidden: Hidden, head: LayerStream | None) -> Differences:
        def run() -> Mapping[str, np.ndarray]:
            start = 0 if self.begun is None else len(self.begun.tokens)
            rest, whole = self.tokens[start:], self.whole[start:]
            found = vars(compare(self.stream, rest, whole, hidden(rest, whole), head))
            if self.begun is None:
                return found
            first = vars(self.begun._differences(title, hidden, head))
            return {name: np.concatenate([first[name], found[name]], axis=-2) for name in found}

        return Differences(**load_arrays(self.work.once(title, run)))

    def curve(
        self,
        along: Along,
        options: Options,
        activations: Activations,
        *,
        densities: Sequence[float] | None = None,
        in_cache: bool = True,
        as_large: ModelSpec | None = None,
    ) -> Curve:
        """Returns a selector's curve at `densities`, by default at all of `along`'s; the rest is as in `variants`."""
        spec = self.stream.spec
        at = [density for density in reached(along, options, spec) if densities is None or density in densities]

        def hidden(tokens: np.ndarray, _: "Tensor") -> "Tensor":
            found = variants(along, options, self.stream.model, activations, at, as_large, in_cache=in_cache)
            return last_hidden(self.stream, tokens, list(found))

        found = self.differences(self._title(along, at, in_cache), hidden)
        points = tuple(Point(density=density, **loss_of(found, number)) for number, density in enumerate(at))
        self._tell(along.title, ((point.density, point.ppl_ratio) for point in points))
        return Curve(**along._asdict(), points=points)

    def at_once(
        self, asked: Sequence[tuple[Along, Options, Sequence[float]]], activations: Activations, *, in_cache: bool
    ) -> None:
        """Measures several selectors, each at some densities, in one pass over the layers, and saves the results for
        `curve`. Holds the hidden states of all in memory."""
        running: dict[str, list[Variant]] = {}
        for along, options, at in asked:
            title = self._title(along, at, in_cache)
            if self.work.current(title) is None:
                model = self.stream.model
                running[title] = list(variants(along, options, model, activations, at, in_cache=in_cache))
        if len(running) < 2:
            return
        hidden = last_hidden(self.stream, self.tokens, [one for found in running.values() for one in found])
        together, start = vars(compare(self.stream, self.tokens, self.whole, hidden)), 0
        for title, found in running.items():
            own = slice(start, start + len(found))
            self.work.save(title, {name: of if name == "whole_nll" else of[own] for name, of in together.items()})
            start += len(found)

    def _title(self, along: Along, densities: Sequence[float], in_cache: bool) -> str:
        at = "-".join(f"{density:g}" for density in densities)
        return f"curve-{along.title}-at-{at}" + ("" if in_cache else "-without-cache")

    def loss(self, title: str, hidden: Hidden, head: LayerStream | None = None) -> dict[str, Any]:
        loss = loss_of(self.differences(title, hidden, head), 0)
        LOG.info("%s: %s: perplexity ratio %.4f", self.stage, title, loss["ppl_ratio"])
        return loss

    def format(self, formats: Formats, *families: FamilyName) -> FormatLoss:
        """Returns the loss of formats, with the matrices of `families`, the MLP's first, rounded in slices of their
        units: columns of a down projection lose up to four times as much as rows."""
        known: Any = {"format": of_layers(formats), "family": families[0], "kept": kept_of(formats)}
        rounded = Rounded(self.stream, keeping(self.stream.model, formats), self.rounding, families)
        if rounded.is_exact:
            self.steps.add()
            return FormatLoss(**(known | NO_LOSS))
        name = formats if isinstance(formats, str) else f"mix-{hashlib.sha256(repr(formats).encode()).hexdigest()[:16]}"
        title = "-".join(("format", name, self.rounding.name, *families))
        return FormatLoss(**known, **self.loss(title, lambda tokens, _: rounded.last_hidden(tokens)))

    def head(self, name: FormatName) -> HeadLoss:
        """Returns the loss of the head in a format: multiplies it with the whole model's hidden states, or, where the
        embeddings are tied to it, with those from rounded embeddings."""
        head, title = RoundedHead(self.stream, name), f"head-{name}"
        if head.is_exact:
            self.steps.add()
            return HeadLoss(format=name, **NO_LOSS)
        is_tied = self.stream.spec.tie_word_embeddings
        loss = self.loss(title, lambda tokens, whole: head.last_hidden(tokens) if is_tied else whole, head)
        return HeadLoss(format=name, **loss)

    def kv_cache(self, kind: KvCacheFormat) -> KvCacheLoss:
        loss = self.loss(f"kv-cache-{kind}", lambda tokens, _: RoundedKeys(self.stream, kind).last_hidden(tokens))
        return KvCacheLoss(kv_cache=kind, **loss)

    def routing(self, along: AlongStrengths) -> RoutingCurve:
        found = self.differences(f"routing-{along.title}", lambda tokens, _: along.last_hidden(self.stream, tokens))
        points = tuple(RoutedPoint(strength=at, **loss_of(found, number)) for number, at in enumerate(STRENGTHS))
        self._tell(along.title, ((point.strength, point.ppl_ratio) for point in points))
        return RoutingCurve(**along._asdict(), points=points)

    def _tell(self, title: str, points: Any) -> None:
        LOG.info("%s: %s: %s", self.stage, title, ", ".join(f"{at:g} {ratio:.3f}" for at, ratio in points))


def loss_of(found: Differences, number: int) -> dict[str, Any]:
    kld = found.kld[number]
    lost = found.nll[number] - found.whole_nll
    ratio, _ = perplexity(lost.mean(axis=1))
    return {
        "mean_kld": float(kld.mean()),
        "mean_kld_error": _finite(standard_error(_of_parts(kld))),
        "p999_kld": float(np.percentile(kld, RARE)),
        "ppl_ratio": ratio,
        "ppl_ratio_error": _finite(ratio * standard_error(_of_parts(lost))),
    }


def _of_parts(values: np.ndarray) -> np.ndarray:
    """Returns the mean of each block of [num_blocks, T], or, of few blocks, of at least LEAST_PARTS parts."""
    per_block = min(-(-LEAST_PARTS // len(values)), values.shape[1])
    return np.concatenate([part.mean(axis=1) for part in np.array_split(values, per_block, axis=1)])


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def rounding_of(
    config: PassesConfig, model: Model, corpus: Corpus, activations: Activations, work: Workspace, threads: int
) -> Rounding:
    algorithm = load("coldpress.compiler.rounding", Algorithm, config.algorithm)
    if not algorithm.NEEDS_GRAM:
        return Rounding(algorithm, activations=activations)
    stream, _ = stream_of(config, model, threads)
    return Rounding(algorithm, add_grams(stream, corpus, _grams_in(work)), activations)


def remove_grams(model: Model, work: Workspace) -> None:
    """Deletes the Gram matrices: no other stage reads them, and they take more disk than the model."""
    for layer in range(model.spec.num_hidden_layers):
        _grams_in(work).remove(f"layer-{layer}")


def _grams_in(work: Workspace) -> Workspace:
    return Workspace(work.folder / "gram", work.fingerprint)
