"""Measures the quality of what can still win, where `explore` has left it to this stage (explore=needed).

If the whole model fits in DRAM in a format that keeps the quality, nothing is measured, but a format on more tokens, at
last the whole validation text, where those of `explore` do not tell whether it keeps the quality. Otherwise formats
that are smaller than a quantized file's own are measured, the largest first, and formats with columns of down, which
the units of all selectors but the dense one have. A search in which no selector loses anything tells which could be
faster than a dense run at all. Those are measured coarsely: on as few tokens, at two densities, and without a cache in
the loop. From that follows the least that each can lose, and the search runs with these losses. While what it takes
stands on such a hope, that selector is measured more closely, the next time on all tokens, and the search runs again.
What the search takes at last has been measured on all tokens, and nothing else would be faster even with the least loss
that the coarse measurement allows.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from coldpress.compiler.activity.calibration_pass import stream_of
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.candidates import ATTENTION, AUTO, DENSE, candidates, misfit, own_options
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.quality.passes import NO_LOSS, Passes, remove_grams, rounding_of
from coldpress.compiler.quality.routings import routing_curves
from coldpress.compiler.quality.trace import few_tokens
from coldpress.compiler.quality.variants import (
    Along,
    asked,
    head_formats_of,
    larger_formats_of,
    reached,
    sample_bytes,
    smaller_formats_of,
)
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.compiler.search import MARGIN, Candidate, Judged
from coldpress.compiler.search.by_layer import Sizes
from coldpress.compiler.stages.allocate._budgets import searched_together
from coldpress.compiler.stages.allocate._config import AllocateConfig
from coldpress.compiler.stages.allocate._mixed import Mixes, last_that_fits
from coldpress.compiler.stages.allocate._quality import LEAST_ERROR, Floor, error_of
from coldpress.compiler.stages.allocate._replay import Replays
from coldpress.compiler.stages.allocate._rules import Inputs
from coldpress.compiler.stages.allocate._searched import Searched
from coldpress.compiler.steps import Steps
from coldpress.schemas.curves import Curve, Curves, FormatLoss, HeadLoss, KvCacheLoss, Loss, Point, Unexplored
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import (
    WHOLE_MLP,
    FamilyName,
    FormatName,
    LayerFormats,
    Method,
    by_layer,
    dense_family,
    head_of,
    names_in,
    of_layers,
    slice_formats,
)
from coldpress.schemas.memory import OverBudgetError

LOG = logging.getLogger(__name__)
COARSE_DENSITIES = (0.5, 0.9)
"""Densities of the coarse measurement."""
OwnLoss = HeadLoss | KvCacheLoss
HOPEFUL = 2.0
"""Divergence, over the logarithm of max_ppl_ratio, up to which formats by layer are worth a measurement."""
ERRORS = 2.0
"""Standard errors by which a coarse measurement may be wrong."""


@dataclass
class _Hope:
    """The least that a selector can lose by what was measured of it."""

    curves: list[Curve]
    words: str = ""
    """Its loss in words; empty if nothing was measured yet."""
    in_cache: bool = False
    """True once a selector that sees residency was measured with a cache in the loop."""

    def why_not(self, does_not_fit: bool, max_ppl_ratio: float) -> str:
        """Returns why the selector is no candidate."""
        if does_not_fit:
            return f"{self.words}, and does not fit in DRAM" if self.words else "does not fit in DRAM"
        if not self.words:
            return "its format, with columns of down, loses too much"
        is_too_much = min(curve.points[-1].ppl_ratio for curve in self.curves) > max_ppl_ratio
        why = "which is too much" if is_too_much else "and its format, with columns of down, loses the rest"
        return f"{self.words}, {why}"


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
    if not every and not _unmeasured(config, curves, dense_family(spec)):
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
            rest.with_columns()
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


def _smallest_first(losses: Sequence[FormatLoss], family: FamilyName) -> list[LayerFormats]:
    own = (loss.format for loss in losses if loss.family == family)
    return sorted(own, key=lambda one: (sample_bytes(one), str(one)))


def _unmeasured(config: AllocateConfig, curves: Curves, family: FamilyName) -> list[FormatName]:
    """Returns the formats that the user named and `explore` left out; none where no format's loss is known."""
    named = () if config.format == AUTO or not curves.formats else dict.fromkeys(slice_formats(config.format))
    return [name for name in named if curves.format_loss(name, family) is None]


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
        self._dense = dense_family(inputs.model.spec)
        self._hopes: dict[Method, _Hope] = {}
        self._sure: dict[tuple[LayerFormats, tuple[FamilyName, ...]], int] = {}
        """Tokens on which formats were measured, where those are more than few: by format and families."""
        self._sure_own: dict[str, int] = {}
        """Tokens on which heads, and keys and values, were measured, where those are more than few: by format."""
        self._steps = Steps("allocate", 0, "passes")

    def fitting(self, budgets: Sequence[int | str]) -> list[Searched]:
        """Searches without any selector, after measuring again each format whose quality few tokens leave open."""
        most = self._floor.max_ppl_ratio
        self._measure_formats(_unmeasured(self._config, self.curves, self._dense), self._dense)
        for name in _smallest_first(self.curves.formats, self._dense):
            self._settle(name)
            if self._is_good(name) and not math.isinf(most):
                break  # larger formats lose less
        else:
            self._enlarge()
        self._settle_heads()
        found = searched_together(self._config, *self._on(self.curves), budgets)
        if self._shrink(found):
            found = searched_together(self._config, *self._on(self.curves), budgets)
        if self._mix(found):
            found = searched_together(self._config, *self._on(self.curves), budgets)
        while self._settle_taken(found):
            found = searched_together(self._config, *self._on(self.curves), budgets)
        streamed = {of_layers(one.best.candidate.format) for one in found if one.best and _streams_attention(one.best)}
        if not streamed:
            return found
        self._remeasure(lambda loss: loss.format in streamed, self._blocks, (self._dense, *ATTENTION))
        return searched_together(self._config, *self._on(self.curves), budgets)

    def _shrink(self, found: Sequence[Searched]) -> bool:
        """Measures formats that are smaller than a quantized file's own, where those do not fit in DRAM; tells whether
        any was measured."""
        smaller = smaller_formats_of(self._inputs.model)
        is_open = self._config.format == AUTO and {loss.format for loss in self.curves.formats}.isdisjoint(smaller)
        if not is_open or not smaller or all(one.best is not None and one.best.holds_everything for one in found):
            return False
        for name in smaller:
            self._measure_formats([name], self._dense)
            self._settle(name)
            if not self._is_good(name):
                break  # smaller formats lose more
        names = head_formats_of(self._inputs.model)
        self._steps.expect(len(names))
        self._add(heads=tuple(map(self._few.head, names)))
        self._settle_heads()
        return True

    def _mix(self, found: Sequence[Searched]) -> bool:
        """Measures formats by layer with which a whole model fits in DRAM, where no single format lets it and they may
        keep the quality; tells whether any was looked at."""
        most, spec = self._floor.max_ppl_ratio, self._inputs.model.spec
        names = self._mixed_names()
        reading = [one for one in found if one.best is None or not one.best.holds_everything]
        if self._config.format != AUTO or math.isinf(most) or len(names) < 2 or not reading:
            return False
        mixes = Mixes(self._inputs.model, names, self.curves.heads)

        def fits(one: Searched, sizes: Sizes) -> bool:
            formats = by_layer(mixes.formats(sizes), spec.num_hidden_layers)
            return one.judge(Candidate(DENSE, formats, None, one.space.caches[0])).holds_everything

        fitting = [one for one in reading if fits(one, (0,) * (spec.num_hidden_layers + 1))]
        if not fitting:
            return True
        self._steps.expect(len(names))
        path, lost = mixes.path([self._few.layer_effects(name, self._dense) for name in names])
        places = {last_that_fits(path, partial(fits, one)) for one in fitting}
        hopeful = [place for place in sorted(places) if lost[place] <= HOPEFUL * math.log(most)]
        known = {loss.format for loss in self.curves.formats}
        for name in {of_layers(mixes.formats(path[place])): None for place in hopeful}:
            if name not in known:
                self._measure_formats([name], self._dense)
                self._settle(name)
        return True

    def _mixed_names(self) -> list[LayerFormats]:
        """Returns the formats that may be mixed, the smallest first; each loses less than all smaller ones: the largest
        two that lose too much, the smallest that keeps the quality, and the one that loses least."""
        names: list[LayerFormats] = []
        least = math.inf
        for name in _smallest_first(self.curves.formats, self._dense):
            loss = self.curves.format_loss(name, self._dense)
            assert loss is not None
            if loss.mean_kld < least:
                names, least = [*names, name], loss.mean_kld
        good = list(map(self._is_good, names))
        first = good.index(True) if any(good) else len(names)
        return [*names[max(0, first - 2) : first + 1], *names[first + 1 :][-1:]]

    def _settle_heads(self) -> None:
        """Measures heads on more tokens where few leave open whether they keep the ratio that layers leave, the largest
        first. If one loses too much, smaller ones lose more, and are left out."""
        most = self._floor.max_ppl_ratio
        left = [most / max(1.0, loss.ppl_ratio) for loss in self.curves.formats if loss.ppl_ratio <= most] or [most]
        heads: list[OwnLoss] = []
        for known in self.curves.heads:
            is_open = any(_is_open(known, room) for room in left)
            loss = self._closer(known, self._tokens) if is_open else known
            if loss.ppl_ratio > max(left):
                break
            heads.append(loss)
        self.curves = self.curves.model_copy(update={"heads": tuple(heads)})

    def _settle_taken(self, found: Sequence[Searched]) -> bool:
        """Measures the heads, and the keys and values, that searches take on more tokens; on the whole validation text
        where it is then open whether all losses together keep the quality. Tells whether any was measured."""
        known = self.curves
        for best in (one.best for one in found if one.best is not None):
            head, kv_cache = head_of(best.candidate.format), best.candidate.kv_cache
            taken: list[OwnLoss] = [
                *(loss for loss in self.curves.heads if head is not None and loss.format == head.format),
                *(loss for loss in self.curves.kv_caches if loss.kv_cache == kv_cache),
            ]
            error = ERRORS * math.hypot(*map(error_of, taken))
            is_open = (best.ppl_ratio or 1.0) + error > self._floor.max_ppl_ratio
            is_next = is_open and all(self._tokens_of(loss) >= self._tokens.size for loss in taken)
            tokens = self._blocks if is_next else self._tokens
            closer = {loss: self._closer(loss, tokens) for loss in taken}
            if any(new is not old for old, new in closer.items()):
                heads = tuple(closer.get(loss, loss) for loss in self.curves.heads)
                kv_caches = tuple(closer.get(loss, loss) for loss in self.curves.kv_caches)
                self.curves = self.curves.model_copy(update={"heads": heads, "kv_caches": kv_caches})
        return self.curves is not known

    def with_columns(self) -> None:
        """Measures the formats that keep the quality in a dense run also with columns of down, which the units of other
        selectors have."""
        if self._dense == WHOLE_MLP:
            return
        spec = self._inputs.model.spec
        fitting = (one for one in _smallest_first(self.curves.formats, self._dense) if self._is_good(one))
        names = [one for one in fitting if not any(misfit(name, spec) for name in names_in(one))]
        known = (self.curves.format_loss(name, WHOLE_MLP) for name in names)
        missing = [name for name, loss in zip(names, known, strict=True) if loss is None]
        self._measure_formats(missing, WHOLE_MLP)

    def _measure_formats(self, names: Sequence[LayerFormats], family: FamilyName) -> None:
        self._steps.expect(len(names))
        self._add(formats=tuple(self._few.format(name, family) for name in names))

    def _settle(self, name: LayerFormats) -> None:
        """Measures a format on more tokens where few leave open whether it keeps the quality; on the whole validation
        text only if it then still may: one that seems to lose too much is not worth the time."""
        most = self._floor.max_ppl_ratio

        def is_worth_it(loss: FormatLoss) -> bool:
            return loss.format == name and loss.ppl_ratio <= most

        if any(loss.format == name and _is_open(loss, most) for loss in self.curves.formats):
            self._remeasure(lambda loss: loss.format == name, self._tokens, (self._dense,))
            self._remeasure(is_worth_it, self._blocks, (self._dense,))

    def _enlarge(self) -> None:
        """Measures larger formats than `explore` did, if none of those keeps the quality, up to one that does."""
        known = [loss.format for loss in self.curves.formats]
        if self._config.format != AUTO or not known or any(map(self._is_good, known)):
            return
        for name in larger_formats_of(self._inputs.model):
            if name not in known:
                self._measure_formats([name], self._dense)
            self._settle(name)
            if self._is_good(name):
                return

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
                return (loss.format, loss.family) in taken and _is_rough(loss)

            again = [self._remeasure(is_asked, self._tokens, (family,)) for family in (self._dense, WHOLE_MLP)]
            if any(again) or self._settle_taken(found):
                continue
            taken = {one.method for one in best} & self._hopes.keys()
            if not taken:
                num_tokens, block_tokens = self._all.tokens.size, self._all.tokens.shape[1]
                measured = self.curves.model_copy(update={"num_tokens": num_tokens, "block_tokens": block_tokens})
                return measured, {**reasons, **dropped, **self._reasons(found)}
            for method in sorted(taken):
                self._measure(method, found)

    def clean(self) -> None:
        if "_rounding" in vars(self) and self._rounding.gram is not None:
            remove_grams(self._inputs.model, self._inputs.work)

    # What is measured

    def _begin(self) -> None:
        """Measures the formats of selectors, and routings, which are few, on all tokens."""
        spec, config = self._inputs.model.spec, self._config
        routings = routing_curves(config.routing, spec)
        self.with_columns()
        self._steps.expect(len(routings))
        self._add(routings=tuple(map(self._all.routing, routings)))

    def _measure_coarsely(self) -> None:
        """Measures the selectors that are left on few tokens, at two densities, without a cache in the loop."""
        self._steps.expect(len(self._hopes))
        together = [(self._every[name][0], self._options[name], self._coarse(name)) for name in self._hopes]
        self._few.at_once(together, self._inputs.activations, in_cache=False)
        for method in self._hopes:
            curve = self._curve(self._few, self._every[method][0], in_cache=False)
            self._hopes[method] = _Hope([hopeful(curve, self._reached(method))], _in_words(curve.points[-1]))

    def _drop(self, budgets: Sequence[int | str]) -> dict[Method, str]:
        """Hopes that no selector loses anything; returns those that even so are not clearly faster than a dense run,
        with the reason, and drops them."""
        for method in self._every:
            points = tuple(Point(density=at, **NO_LOSS) for at in self._reached(method))
            lossless = [Curve(**along._asdict(), points=points) for along in self._every[method]]
            self._hopes[method] = _Hope(lossless)
        found = searched_together(self._config, *self._on(self._hoped), budgets, replays=self._replays)
        reasons, enough = self._reasons(found), 1 / (1 - MARGIN)
        dropped = {name: why for name, why in reasons.items() if (_gain(name, found) or 0.0) < enough}
        for method in dropped:
            del self._hopes[method]
        return dropped

    def _remeasure(
        self, is_asked: Callable[[FormatLoss], bool], tokens: np.ndarray, families: tuple[FamilyName, ...]
    ) -> bool:
        """Measures formats on more tokens that were measured on few, if it is asked for, or in slices of more families;
        tells whether there was anything to measure."""
        losses = {(loss.format, loss.family): loss for loss in self.curves.formats}
        family, *others = families
        names = [
            name
            for (name, own), loss in losses.items()
            if own == family and is_asked(loss) and self._sure.get((name, families), 0) < tokens.size
        ]
        if not names or (self._are_few(tokens) and not others):
            return False
        self._sure |= {(name, families): tokens.size for name in names}
        self._steps.expect(len(names))
        passes = self._on_tokens(tokens)
        found = losses | {(name, family): passes.format(name, *families) for name in names}
        self.curves = self.curves.model_copy(update={"formats": tuple(found.values())})
        return True

    def _closer(self, known: OwnLoss, tokens: np.ndarray) -> OwnLoss:
        """Measures a head, or keys and values, on more tokens, unless it was measured on as many or loses nothing."""
        if self._tokens_of(known) >= tokens.size or not _is_rough(known):
            return known
        self._sure_own[_name(known)] = tokens.size
        self._steps.expect(1)
        passes = self._on_tokens(tokens)
        return passes.head(known.format) if isinstance(known, HeadLoss) else passes.kv_cache(known.kv_cache)

    def _tokens_of(self, loss: OwnLoss) -> int:
        return self._sure_own.get(_name(loss), few_tokens(self._blocks).size)

    def _on_tokens(self, tokens: np.ndarray) -> Passes:
        return self._all if tokens.size == self._tokens.size else self._every_token

    def _are_few(self, tokens: np.ndarray) -> bool:
        return tokens.size <= few_tokens(self._blocks).size

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

    def _is_good(self, name: LayerFormats) -> bool:
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
                refusals = [one.judge.refusals.get(method) for one in found]
                is_refused = any(isinstance(refusal, OverBudgetError) for refusal in refusals)
                reasons[method] = hope.why_not(is_refused, self._floor.max_ppl_ratio)
            else:
                lost = f": {hope.words}" if hope.words else ", even if it lost nothing"
                reasons[method] = f"at best {gain:.2f} times as fast as a dense run{lost}"
        return reasons

    # Passes

    @cached_property
    def _replays(self) -> Replays:
        return Replays(replace(self._inputs, curves=self._hoped))

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

    @cached_property
    def _every_token(self) -> Passes:
        return self._passes(self._blocks)

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


def _name(loss: OwnLoss) -> str:
    return f"head {loss.format}" if isinstance(loss, HeadLoss) else f"kv_cache {loss.kv_cache}"


def _is_rough(loss: Loss) -> bool:
    return error_of(loss) > LEAST_ERROR


def _is_open(loss: Loss, max_ratio: float) -> bool:
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
