"""Measures the quality of candidates that can still win, where `explore` left that to this stage (explore=needed). With
explore=whole it measures no selector, only formats, heads, keys and values that need more text.

If the whole model fits in DRAM in formats that keep the quality, no selector is measured (_formats.py). Otherwise
formats are measured with columns of down, too, which the units of all selectors but the dense one have. A search that
assumes no loss drops the selectors that would not be faster than a dense run even so. The others are measured coarsely:
on few tokens, at two densities, and without a cache in the loop. The search then runs with the least losses that these
measurements allow. As long as its choice rests on such a hope, that selector is measured more closely, at last on all
asked tokens, and the search runs again. So the final choice is measured on all asked tokens, and no other candidate
would be faster even with the least loss that its coarse measurement allows.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from coldpress.compiler.candidates import candidates, own_options
from coldpress.compiler.quality.passes import NO_LOSS, Passes
from coldpress.compiler.quality.variants import Along, asked, reached, routing_curves
from coldpress.compiler.search import MARGIN, Judged, Space
from coldpress.compiler.search.budgets import searched_together
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.floor import LEAST_ERROR, Floor
from coldpress.compiler.search.judge import Searched
from coldpress.compiler.search.replay import Replays
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.shared_settings import WHOLE
from coldpress.compiler.stages.allocate._formats import ERRORS, MeasuredFormats, is_rough, unmeasured
from coldpress.schemas.curves import Curve, Curves, FormatLoss, Point, Unexplored
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import WHOLE_MLP, Method, dense_family, of_layers
from coldpress.schemas.memory import OverBudgetError

LOG = logging.getLogger(__name__)
COARSE_DENSITIES = (0.5, 0.9)


@dataclass
class _Hope:
    """The least that a selector can lose, given its measurements so far."""

    curves: list[Curve]
    words: str = ""
    """Its loss in words; empty if nothing was measured yet."""
    in_cache: bool = False
    """True once a selector that sees residency was measured with a cache in the loop."""

    def why_not(self, does_not_fit: bool, max_ppl_ratio: float) -> str:
        if does_not_fit:
            return f"{self.words}, and does not fit in DRAM" if self.words else "does not fit in DRAM"
        if not self.words:
            return "its format, with columns of down, loses too much"
        is_too_much = min(curve.points[-1].ppl_ratio for curve in self.curves) > max_ppl_ratio
        why = "which is too much" if is_too_much else "and its format, with columns of down, loses the rest"
        return f"{self.words}, {why}"


def completed(config: AllocateConfig, inputs: AllocationInputs, floor: Floor, budgets: Sequence[int | str]) -> Curves:
    """Returns the curves, with those of selectors that can still win added, and reasons for the others.

    Raises:
        ColdpressError: if curves are missing, and there is no text to measure them on.
        DoesNotFitError: if no run fits a budget, which is known before any selector is measured.
    """
    curves, spec = floor.curves, inputs.model.spec
    known = {curve.method for curve in curves.curves} | {entry.method for entry in curves.unexplored}
    options = {name: own_options(name, config.options) for name in candidates(spec, config.options)}
    reasons, every = asked({name: own for name, own in options.items() if name not in known}, spec)
    asks_more = config.explore == WHOLE or unmeasured(config, curves, dense_family(spec))
    if not every and not asks_more:
        return _with_reasons(curves, reasons)
    if inputs.corpus is None:
        raise ColdpressError("method=auto measures selectors on text, and no corpus was given; give --corpus")
    rest = _Rest(config, inputs, floor, options, every)
    try:
        found = rest.fitting(budgets)
        for one in reversed(found):  # no selector fits where a dense run does not
            if one.best is None:
                raise one.refusal
        best = [one.best for one in found if one.best is not None]
        if not every:
            rest.with_columns()
            return _with_reasons(rest.curves, reasons)
        if all(one.holds_everything for one in best):
            why = "was not measured: the whole model fits in DRAM"
        elif any(one.candidate.streams_attention for one in best):
            why = "was not measured: attention does not fit in DRAM, and dense runs alone read it from flash"
        else:
            return _with_reasons(*rest.measured(budgets, reasons))
        return _with_reasons(rest.curves, reasons | {along.method: why for along in every})
    finally:
        rest.clean()


class _Rest(MeasuredFormats):
    def __init__(
        self,
        config: AllocateConfig,
        inputs: AllocationInputs,
        floor: Floor,
        options: Mapping[Method, Any],
        every: Sequence[Along],
    ) -> None:
        super().__init__(config, inputs, floor)
        self._options = options
        self._every: dict[Method, list[Along]] = {}
        for along in every:
            self._every.setdefault(along.method, []).append(along)
        self._hopes: dict[Method, _Hope] = {}

    def measured(
        self, budgets: Sequence[int | str], reasons: Mapping[Method, str]
    ) -> tuple[Curves, Mapping[Method, str]]:
        self._begin()
        dropped = self._drop(budgets)
        self._measure_coarsely()
        while True:
            found = searched_together(self._config, *self._on(self._hoped), budgets, replays=self._replays)
            best = [one.best.candidate for one in found if one.best is not None]
            formats = {(of_layers(one.format), self._floor.family(one.method)) for one in best}

            def is_asked(loss: FormatLoss, taken: Collection[Any] = formats) -> bool:
                return (loss.format, loss.family) in taken and is_rough(loss)

            again = [
                self._remeasure(is_asked, self._passes.asked_tokens, (family,)) for family in (self._dense, WHOLE_MLP)
            ]
            if any(again) or self._settle_taken(found):
                continue
            taken = {one.method for one in best} & self._hopes.keys()
            if not taken:
                num_tokens, block_tokens = self._passes.asked.tokens.size, self._passes.asked.tokens.shape[1]
                measured = self.curves.model_copy(update={"num_tokens": num_tokens, "block_tokens": block_tokens})
                return measured, {**reasons, **dropped, **self._reasons(found)}
            for method in sorted(taken):
                self._measure(method, found)

    def _begin(self) -> None:
        """Measures formats with columns of down on few tokens, and routings, which are few, on all asked ones."""
        spec, config = self._inputs.model.spec, self._config
        routings = routing_curves(config.routing, spec)
        self.with_columns()
        self._steps.expect(len(routings))
        self._add(routings=tuple(map(self._passes.asked.routing, routings)))

    def _drop(self, budgets: Sequence[int | str]) -> dict[Method, str]:
        """Drops selectors that are not clearly faster than a dense run even without any loss; returns the reasons."""
        for method in self._every:
            points = tuple(Point(density=at, **NO_LOSS) for at in self._reached(method))
            lossless = [Curve(**along._asdict(), points=points) for along in self._every[method]]
            self._hopes[method] = _Hope(lossless)
        found = searched_together(self._config, *self._on(self._hoped), budgets, _sparsest, replays=self._replays)
        reasons, enough = self._reasons(found), 1 / (1 - MARGIN)
        dropped = {name: why for name, why in reasons.items() if (_gain(name, found) or 0.0) < enough}
        for method in dropped:
            del self._hopes[method]
        return dropped

    def _measure_coarsely(self) -> None:
        self._steps.expect(len(self._hopes))
        together = [(self._every[name][0], self._options[name], self._coarse(name)) for name in self._hopes]
        self._passes.few.at_once(together, self._inputs.activations, in_cache=False)
        for method in self._hopes:
            curve = self._curve(self._passes.few, self._every[method][0], in_cache=False)
            self._hopes[method] = _Hope([hopeful(curve, self._reached(method))], _in_words(curve.points[-1]))

    def _measure(self, method: Method, found: Sequence[Searched]) -> None:
        """Measures a selector on all asked tokens; one that sees residency first on few, with a cache in the loop."""
        hope = self._hopes.pop(method)
        along = self._every[method]
        least = min(one.candidate.density or 0.0 for searched in found for one in _judged(method, searched))
        self._steps.expect(len(along))
        sees = along[0].resident_share is not None and not hope.in_cache
        passes = self._passes.few if sees else self._passes.asked
        curves = [self._curve(passes, one, above=least) for one in along]
        if sees:
            hoped = [hopeful(curve, self._reached(method)) for curve in curves]
            self._hopes[method] = _Hope(hoped, _in_words(curves[0].points[-1]), in_cache=True)
        else:
            self._add(curves=tuple(curves))

    def _curve(self, passes: Passes, along: Along, above: float | None = None, *, in_cache: bool = True) -> Curve:
        """Measures a curve: at the coarse densities, or, if `above` is given, from the next lower density on."""
        known = self._reached(along.method)
        if above is None:
            densities = self._coarse(along.method)
        else:
            lower = [at for at in known if at < above - LEAST_ERROR]
            densities = [at for at in known if at >= (lower[-1] if lower else known[0])]
            if passes is self._passes.few:
                densities = list(dict.fromkeys((densities[0], densities[-1])))
        own, activations = self._options[along.method], self._inputs.activations
        return passes.curve(along, own, activations, densities=densities, in_cache=in_cache)

    def _coarse(self, method: Method) -> Sequence[float]:
        known = self._reached(method)
        return [at for at in COARSE_DENSITIES if at in known] or known[-1:]

    def _reached(self, method: Method) -> tuple[float, ...]:
        return reached(self._every[method][0], self._options[method], self._inputs.model.spec)

    @property
    def _hoped(self) -> Curves:
        curves = (*self.curves.curves, *(curve for hope in self._hopes.values() for curve in hope.curves))
        return self.curves.model_copy(update={"curves": curves})

    def _reasons(self, found: Sequence[Searched]) -> dict[Method, str]:
        reasons: dict[Method, str] = {}
        for method, hope in self._hopes.items():
            gain = _gain(method, found)
            if gain is None:
                refusals = [one.judge.refusals.get(method) for one in found]
                is_refused = any(isinstance(refusal, OverBudgetError) for refusal in refusals)
                reasons[method] = hope.why_not(is_refused, self._floor.max_ppl_ratio)
            else:
                lost = f": {hope.words}" if hope.words else ", even if it lost nothing"
                reasons[method] = f"at best {gain:.2f} times as fast as a dense run{lost}"
        return reasons

    @cached_property
    def _replays(self) -> Replays:
        return Replays(replace(self._inputs, curves=self._hoped))


def _sparsest(space: Space) -> Space:
    """Keeps only each selector's lowest density: without any loss it is the fastest."""
    return replace(space, densities=lambda *which: space.densities(*which)[:1])


def hopeful(curve: Curve, densities: Sequence[float]) -> Curve:
    """Returns the least losses at `densities` that a coarse measurement allows: the measured losses less ERRORS
    standard errors, interpolated geometrically. True losses do not lie below that: they rise ever faster the fewer
    units remain."""
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


def _judged(method: Method, searched: Searched) -> list[Judged]:
    return [one for one in searched.judge.judged if one.candidate.method == method and one.refusal is None]


def _gain(method: Method, found: Sequence[Searched]) -> float | None:
    """Returns a selector's best speed-up over a dense run; None where it was no candidate."""
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
