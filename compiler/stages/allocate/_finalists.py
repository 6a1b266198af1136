"""Measures the quality of what can still win, where `explore` has left it to this stage (explore=needed).

If the whole model fits in DRAM in a format that keeps the quality, nothing is measured, but a format on more tokens, at
last the whole validation text, where those of `explore` do not tell whether it keeps the quality. Otherwise all
selectors are measured coarsely: on as few tokens, at two densities, and without a cache in the loop. From that follows
the least that each can lose, and the search runs with these losses. While what it takes stands on such a hope, that
selector is measured more closely, the next time on all tokens, and the search runs again. What the search takes at last
has been measured on all tokens, and nothing else would be faster even with the least loss that the coarse measurement
allows.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from coldpress.compiler.activity.calibration_pass import stream_of
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.candidates import ATTENTION, AUTO, candidates, own_options
from coldpress.compiler.cost_model import slice_bytes
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.quality.passes import Passes, remove_grams, rounding_of
from coldpress.compiler.quality.routings import routing_curves
from coldpress.compiler.quality.trace import few_tokens
from coldpress.compiler.quality.variants import SAMPLE, Along, asked, larger_formats_of, reached
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.compiler.search import Judged
from coldpress.compiler.stages.allocate._budgets import searched_together
from coldpress.compiler.stages.allocate._config import AllocateConfig
from coldpress.compiler.stages.allocate._quality import LEAST_ERROR, Floor, error_of
from coldpress.compiler.stages.allocate._replay import Replays
from coldpress.compiler.stages.allocate._rules import Inputs
from coldpress.compiler.stages.allocate._searched import Searched
from coldpress.compiler.steps import Steps
from coldpress.runtime.quantization._mixed import coarsest
from coldpress.schemas.curves import Curve, Curves, FormatLoss, Point, Unexplored
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import WHOLE_MLP, FamilyName, FormatName, Method, slice_formats

LOG = logging.getLogger(__name__)
COARSE_DENSITIES = (0.5, 0.9)
"""Densities of the coarse measurement."""
ERRORS = 2.0
"""Standard errors by which a coarse measurement may be wrong."""


@dataclass
class _Hope:
    """The least that a selector can lose by what was measured of it."""

    curves: list[Curve]
    words: str
    in_cache: bool = False
    """True once a selector that sees residency was measured with a cache in the loop."""


def completed(config: AllocateConfig, inputs: Inputs, floor: Floor, budgets: Sequence[int | str]) -> Curves:
    """Returns the curves with those of the selectors that can still win, and reasons for all others.

    Raises:
        ColdpressError: if curves are missing, and there is no text to measure them on.
        DoesNotFitError: if no run fits a budget, which is known before any selector is measured.
    """
    curves, spec = floor.curves, inputs.model.spec
    known = {curve.method for curve in curves.curves} | {entry.method for entry in curves.unexplored}
    options = {name: own_options(name, config.options) for name in candidates(spec, config.options)}
    reasons, every = asked({name: own for name, own in options.items() if name not in known}, spec)
    if not every and not _unmeasured(config, curves):
        return _with_reasons(curves, reasons)
    if inputs.corpus is None:
        raise ColdpressError("method=auto measures selectors on text, and no corpus was given; give --corpus")
    rest = _Rest(config, inputs, floor, options, every)
    try:
        found = rest.fitting(budgets)
        for one in reversed(found):  # whatever a selector leaves out, it needs what a dense run does
            if one.best is None:
                raise one.refusal
        best = [one.best for one in found if one.best is not None]
        if not every:
            return _with_reasons(rest.curves, reasons)
        if all(one.holds_everything for one in best):
            why = "was not measured: the whole model fits in DRAM"
        elif any(map(_streams_attention, best)):
            why = "was not measured: attention does not fit in DRAM, and dense runs alone read it from flash"
        else:
            return _with_reasons(*rest.measured(budgets, reasons))
        return _with_reasons(rest.curves, reasons | {along.method: why for along in every})
    finally:
        rest.clean()


def _smallest_first(losses: Sequence[FormatLoss]) -> list[FormatName]:
    return sorted((loss.format for loss in losses), key=lambda name: (slice_bytes(SAMPLE, name), name))


def _unmeasured(config: AllocateConfig, curves: Curves) -> list[FormatName]:
    """Returns the formats that the user named and `explore` left out; none where no format's loss is known."""
    named = () if config.format == AUTO or not curves.formats else dict.fromkeys(slice_formats(config.format))
    return [name for name in named if curves.format_loss(name) is None]


class _Rest:
    """The measurements that `explore` has left, and what is known of them so far."""

    def __init__(
        self,
        config: AllocateConfig,
        inputs: Inputs,
        floor: Floor,
        options: Mapping[Method, Any],
        every: Sequence[Along],
    ) -> None:
        self._config, self._inputs, self._floor, self._options = config, inputs, floor, options
        self._every: dict[Method, list[Along]] = {}
        for along in every:
            self._every.setdefault(along.method, []).append(along)
        self.curves = floor.curves
        self._hopes: dict[Method, _Hope] = {}
        self._sure: dict[tuple[str, FormatName, tuple[FamilyName, ...]], int] = {}
        """Tokens on which losses were measured, where those are more than few: by kind, format and families."""
        self._steps = Steps("allocate", 0, "passes")

    def fitting(self, budgets: Sequence[int | str]) -> list[Searched]:
        """Searches without any selector, after measuring again each format whose quality few tokens leave open."""
        most = self._floor.max_ppl_ratio
        self._measure_formats(_unmeasured(self._config, self.curves))
        for name in _smallest_first(self.curves.formats):
            self._settle(name)
            if self._is_good(name) and not math.isinf(most):
                break  # larger formats lose less
        else:
            self._enlarge()
        left = [most / max(1.0, loss.ppl_ratio) for loss in self.curves.formats if loss.ppl_ratio <= most]
        self._again("heads", lambda loss: any(_is_open(loss, room) for room in left), self._tokens)
        found = searched_together(self._config, *self._on(self.curves), budgets)
        streamed = {coarsest(one.best.candidate.format) for one in found if one.best and _streams_attention(one.best)}
        if not streamed:
            return found
        self._again("formats", lambda loss: loss.format in streamed, self._blocks, (WHOLE_MLP, *ATTENTION))
        return searched_together(self._config, *self._on(self.curves), budgets)

    def _measure_formats(self, names: Sequence[FormatName]) -> None:
        self._steps.expect(len(names))
        self._add(formats=tuple(map(self._few.format, names)))

    def _settle(self, name: FormatName) -> None:
        """Measures a format on more tokens where few leave open whether it keeps the quality; on the whole validation
        text unless it then surely does not."""
        most = self._floor.max_ppl_ratio

        def is_worth_it(loss: FormatLoss) -> bool:
            return loss.format == name and (self._is_good(name) or _is_open(loss, most))

        if any(loss.format == name and _is_open(loss, most) for loss in self.curves.formats):
            self._again("formats", lambda loss: loss.format == name, self._tokens)
            self._again("formats", is_worth_it, self._blocks)

    def _enlarge(self) -> None:
        """Measures larger formats than `explore` did, if none of those keeps the quality, up to one that does."""
        known = [loss.format for loss in self.curves.formats]
        if self._config.format != AUTO or not known or any(map(self._is_good, known)):
            return
        for name in larger_formats_of(self._inputs.model):
            if name not in known:
                self._measure_formats([name])
            self._settle(name)
            if self._is_good(name):
                return

    def measured(
        self, budgets: Sequence[int | str], reasons: Mapping[Method, str]
    ) -> tuple[Curves, Mapping[Method, str]]:
        self._begin()
        replays = Replays(replace(self._inputs, curves=self._hoped))
        while True:
            found = searched_together(self._config, *self._on(self._hoped), budgets, replays=replays)
            best = [one.best.candidate for one in found if one.best is not None]
            formats = {coarsest(one.format) for one in best}
            if self._again("formats", lambda loss, at=formats: loss.format in at and _is_rough(loss), self._tokens):
                continue
            taken = {one.method for one in best} & self._hopes.keys()
            if not taken:
                num_tokens, block_tokens = self._all.tokens.size, self._all.tokens.shape[1]
                measured = self.curves.model_copy(update={"num_tokens": num_tokens, "block_tokens": block_tokens})
                return measured, {**reasons, **self._reasons(found)}
            for method in sorted(taken):
                self._measure(method, found)

    def clean(self) -> None:
        if "_rounding" in vars(self) and self._rounding.gram is not None:
            remove_grams(self._inputs.model, self._inputs.work)

    # What is measured

    def _begin(self) -> None:
        """Measures everything coarsely, and routings, which are few, on all tokens."""
        spec, config = self._inputs.model.spec, self._config
        routings = routing_curves(config.routing, spec)
        most = self._floor.max_ppl_ratio
        self._again("heads", lambda loss: loss.ppl_ratio <= most and _is_rough(loss), self._tokens)
        self._steps.expect(len(routings) + len(self._every))
        self._add(routings=tuple(map(self._all.routing, routings)))
        together = [(each[0], self._options[method], self._coarse(method)) for method, each in self._every.items()]
        self._few.at_once(together, self._inputs.activations, in_cache=False)
        for method, each in self._every.items():
            curve = self._curve(self._few, each[0], in_cache=False)
            self._hopes[method] = _Hope([hopeful(curve, self._reached(method))], _in_words(curve.points[-1]))

    def _again(
        self,
        kind: Literal["formats", "heads"],
        is_asked: Callable[[FormatLoss], bool],
        tokens: np.ndarray,
        families: tuple[FamilyName, ...] = (WHOLE_MLP,),
    ) -> bool:
        """Measures on more tokens what was measured on few, if it is asked for, or in slices of more families; tells
        whether there was anything to measure."""
        losses: tuple[FormatLoss, ...] = getattr(self.curves, kind)
        known = {loss.format: self._sure.get((kind, loss.format, families), 0) for loss in losses}
        names = [loss.format for loss in losses if is_asked(loss) and known[loss.format] < tokens.size]
        if not names or (tokens.size <= few_tokens(self._blocks).size and families == (WHOLE_MLP,)):
            return False
        self._sure |= {(kind, name, families): tokens.size for name in names}
        passes = self._all if tokens.size == self._tokens.size else self._passes(tokens)
        measure = {"formats": partial(Passes.format, families=families), "heads": Passes.head}[kind]
        self._steps.expect(len(names))
        found = {loss.format: loss for loss in losses} | {name: measure(passes, name) for name in names}
        self.curves = self.curves.model_copy(update={kind: tuple(found.values())})
        return True

    def _on(self, curves: Curves) -> tuple[Inputs, Floor]:
        return replace(self._inputs, curves=curves), replace(self._floor, curves=curves)

    def _measure(self, method: Method, found: Sequence[Searched]) -> None:
        """Measures more closely: on all tokens, but a selector that sees residency first on one block."""
        hope = self._hopes.pop(method)
        along, least = self._every[method], min(_densities(method, found))
        self._steps.expect(len(along))
        sees = along[0].resident_share is not None and not hope.in_cache
        passes = self._few if sees else self._all
        curves = [self._curve(passes, one, above=least) for one in along]
        if sees:
            hoped = [hopeful(curve, self._reached(method)) for curve in curves]
            self._hopes[method] = _Hope(hoped, _in_words(curves[0].points[-1]), in_cache=True)
        else:
            self._add(curves=tuple(curves))

    def _curve(self, passes: Passes, along: Along, above: float | None = None, *, in_cache: bool = True) -> Curve:
        """Measures a curve: coarsely, or from the density below `above` on."""
        known = self._reached(along.method)
        if above is None:
            densities = self._coarse(along.method)
        else:
            lower = [at for at in known if at < above - LEAST_ERROR]
            densities = [at for at in known if at >= (lower[-1] if lower else known[0])]
            if passes is self._few:
                densities = list(dict.fromkeys((densities[0], densities[-1])))
        own, activations = self._options[along.method], self._inputs.activations
        return passes.curve(along, own, activations, densities=densities, in_cache=in_cache)

    def _coarse(self, method: Method) -> Sequence[float]:
        """Returns the densities of the coarse measurement."""
        known = self._reached(method)
        return [at for at in COARSE_DENSITIES if at in known] or known[-1:]

    def _reached(self, method: Method) -> tuple[float, ...]:
        return reached(self._every[method][0], self._options[method], self._inputs.model.spec)

    def _is_good(self, name: FormatName) -> bool:
        return replace(self._floor, curves=self.curves).most_format_ratio(name) <= self._floor.max_ppl_ratio

    def _add(self, **found: tuple[Any, ...]) -> None:
        self.curves = self.curves.model_copy(
            update={name: (*getattr(self.curves, name), *values) for name, values in found.items()}
        )

    @property
    def _hoped(self) -> Curves:
        curves = (*self.curves.curves, *(curve for hope in self._hopes.values() for curve in hope.curves))
        return self.curves.model_copy(update={"curves": curves})

    def _reasons(self, found: Sequence[Searched]) -> dict[Method, str]:
        reasons: dict[Method, str] = {}
        for method, hope in self._hopes.items():
            gain = _gain(method, found)
            if gain is None:
                is_refused = any(_of_method(method, one.judge.judged) for one in found)
                reasons[method] = f"{hope.words}, {'and does not fit in DRAM' if is_refused else 'which is too much'}"
            else:
                reasons[method] = f"at best {gain:.2f} times as fast as a dense run: {hope.words}"
        return reasons

    # Passes

    @cached_property
    def _stream(self) -> LayerStream:
        return stream_of(self._config, self._inputs.model, self._inputs.threads)[0]

    @cached_property
    def _rounding(self) -> Rounding:
        given = self._inputs
        assert given.corpus is not None
        return rounding_of(self._config, given.model, given.corpus, given.activations, given.work, given.threads)

    @cached_property
    def _all(self) -> Passes:
        return self._passes(self._tokens)

    @property
    def _tokens(self) -> np.ndarray:
        """Returns the first explore_tokens tokens, int [num_blocks, T]."""
        return self._blocks[: max(1, self._config.explore_tokens // self._blocks.shape[1])]

    @cached_property
    def _few(self) -> Passes:
        return self._passes(few_tokens(self._blocks))

    @cached_property
    def _blocks(self) -> np.ndarray:
        assert self._inputs.corpus is not None
        return load_arrays(self._inputs.corpus.split("validation").arrays, "tokens")["tokens"]

    def _passes(self, tokens: np.ndarray) -> Passes:
        work = Workspace(
            self._inputs.work.folder / "quality-{}x{}".format(*tokens.shape), self._inputs.work.fingerprint
        )
        whole = self._stream.last_hidden(tokens)
        return Passes("allocate", self._stream, tokens, whole, work, self._steps, self._rounding)


def hopeful(curve: Curve, densities: Sequence[float]) -> Curve:
    """Returns the least that a coarsely measured selector can lose at some densities: what was measured less ERRORS
    standard errors, and between two densities by their geometric mean, below which losses do not lie: they rise ever
    faster the fewer units remain."""
    known = list(curve.points)
    at = np.array([point.density for point in known])
    lost = np.log([max(point.ppl_ratio - ERRORS * (point.ppl_ratio_error or 0.0) - 1, LEAST_ERROR) for point in known])
    slope = (lost[-1] - lost[0]) / (at[-1] - at[0]) if len(known) > 1 else 0.0
    losses = np.exp(lost[-1] + min(slope, 0.0) * (np.array(densities) - at[-1]))
    points = tuple(
        known[-1].model_copy(update={"density": density, "ppl_ratio": 1 + loss, "ppl_ratio_error": None})
        for density, loss in zip(densities, losses.tolist(), strict=True)
    )
    return curve.model_copy(update={"points": points})


def _is_rough(loss: FormatLoss) -> bool:
    return error_of(loss) > LEAST_ERROR


def _is_open(loss: FormatLoss, max_ratio: float) -> bool:
    """Returns whether more text may change the answer to whether a format keeps a ratio."""
    error = ERRORS * error_of(loss)
    return loss.ppl_ratio - error <= max_ratio < max(1.0, loss.ppl_ratio) + error


def _streams_attention(best: Judged) -> bool:
    return best.candidate.streams_attention


def _densities(method: Method, found: Sequence[Searched]) -> list[float]:
    return [one.candidate.density or 0.0 for searched in found for one in _judged(method, searched)]


def _judged(method: Method, searched: Searched) -> list[Judged]:
    return [one for one in _of_method(method, searched.judge.judged) if one.refusal is None]


def _of_method(method: Method, judged: Sequence[Judged]) -> list[Judged]:
    return [one for one in judged if one.candidate.method == method]


def _gain(method: Method, found: Sequence[Searched]) -> float | None:
    """Returns how much faster than a dense run a selector is at best; None where it was no candidate."""
    gains = [
        searched.dense.token_s / min(one.token_s for one in judged)
        for searched in found
        if searched.dense is not None and (judged := _judged(method, searched))
    ]
    return max(gains, default=None)


def _in_words(point: Point) -> str:
    error = "" if point.ppl_ratio_error is None else f" ± {point.ppl_ratio_error:.3f}"
    return f"loses {point.ppl_ratio:.3f}{error} times the perplexity at a density of {point.density:g}"


def _with_reasons(curves: Curves, reasons: Mapping[Method, str]) -> Curves:
    entries = tuple(Unexplored(method=name, reason=reason) for name, reason in reasons.items())
    return curves.model_copy(update={"unexplored": (*curves.unexplored, *entries)})
