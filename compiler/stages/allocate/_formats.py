"""Measures formats of layers, of the head, and of keys and values, on as much text as the search needs.

If the whole model fits in DRAM in a format that keeps the quality, only formats that the tokens of `explore` leave in
doubt are measured, on more tokens. Otherwise formats by matrix (_mixed.py) and smaller formats for all layers are
measured, with attention in columns where it is on flash. Heads, keys and values that the search then takes are measured
on more text, too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from coldpress.compiler.activity.sensitivity import sensitivities
from coldpress.compiler.candidates import ATTENTION, AUTO, DENSE, fits_columns
from coldpress.compiler.io import load_arrays
from coldpress.compiler.quality.variants import head_formats_of, larger_formats_of, sample_bytes, smaller_formats_of
from coldpress.compiler.search import Candidate
from coldpress.compiler.search.budgets import searched_together
from coldpress.compiler.search.by_layer import Sizes
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.floor import LEAST_ERROR, Floor, error_of
from coldpress.compiler.search.judge import Searched
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.shared_settings import WHOLE
from coldpress.compiler.stages.allocate._mixed import Mixes, expected_effects, formats_of_matrices, last_that_fits
from coldpress.compiler.stages.allocate._text_passes import TextPasses
from coldpress.compiler.steps import Steps
from coldpress.schemas.curves import Curves, FormatLoss, HeadLoss, KvCacheLoss, Loss
from coldpress.schemas.families import (
    BLOCKS,
    WHOLE_MLP,
    FamilyName,
    FormatName,
    Formats,
    LayerFormats,
    dense_family,
    of_layers,
    slice_formats,
)

OwnLoss = HeadLoss | KvCacheLoss
HOPEFUL = 1.5
"""Formats are measured if their expected divergence is at most this times the logarithm of max_ppl_ratio."""
LEAST_TRIES = 3
"""Most attempts to find the smallest formats by matrix that keep the quality."""
LEAST_FACTOR = 1.25
"""Least factor on the layers' expected divergence: it is a fifth to a third too low, before any standard error."""
ERRORS = 2.0
"""Standard errors by which a coarse measurement may be wrong."""


class MeasuredFormats:
    def __init__(self, config: AllocateConfig, inputs: AllocationInputs, floor: Floor) -> None:
        self._config, self._inputs, self._floor = config, inputs, floor
        self.curves = floor.curves
        self._dense = dense_family(inputs.model.spec)
        self._sure: dict[tuple[LayerFormats, tuple[FamilyName, ...]], int] = {}
        """By format and families: the number of tokens it was measured on, if more than few."""
        self._sure_own: dict[str, int] = {}
        """By format of a head, or of keys and values: the number of tokens it was measured on, if more than few."""
        self._streamed: set[LayerFormats] = set()
        """Formats that a search took with attention on flash."""
        self._steps = Steps("allocate", 0, "passes")
        self._passes = TextPasses(config, inputs, self._steps)
        self._mixes: Mixes | None = None
        """Formats by matrix with their expected losses; None until `_mix` needs them."""
        if config.explore == WHOLE:
            known, num_tokens = self.curves, self._passes.asked_tokens.size
            self._sure = {(loss.format, (self._dense,)): self._passes.all_tokens.size for loss in known.formats}
            self._sure_own = {_name(loss): num_tokens for loss in (*known.heads, *known.kv_caches)}

    def fitting(self, budgets: Sequence[int | str]) -> list[Searched]:
        """Searches with the selectors known so far, after measuring formats again that few tokens leave in doubt."""
        most = self._floor.max_ppl_ratio
        self._measure_formats(unmeasured(self._config, self.curves, self._dense), self._dense)
        for name in smallest_first(self.curves.formats, self._dense):
            self._settle(name)
            if self._is_good(name) and not math.isinf(most):
                break  # larger formats lose less
        else:
            self._enlarge()
        self._settle_heads()
        found = searched_together(self._config, *self._on(self.curves), budgets)
        for measured in (self._measure_heads, self._mix, self._shrink):
            if measured(found):
                found = searched_together(self._config, *self._on(self.curves), budgets)
        while self._settle_taken(found):
            found = searched_together(self._config, *self._on(self.curves), budgets)
        return found

    def with_columns(self) -> None:
        """Measures formats of good dense runs also with columns of down, which other selectors' units have."""
        if self._dense == WHOLE_MLP:
            return
        spec = self._inputs.model.spec
        fitting = (one for one in smallest_first(self.curves.formats, self._dense) if self._is_good(one))
        names = [one for one in fitting if fits_columns(one, spec)]
        known = (self.curves.format_loss(name, WHOLE_MLP) for name in names)
        missing = [name for name, loss in zip(names, known, strict=True) if loss is None]
        self._measure_formats(missing, WHOLE_MLP)

    def clean(self) -> None:
        self._passes.clean()

    def _shrink(self, found: Sequence[Searched]) -> bool:
        """Measures formats smaller than a file's own, where those do not fit in DRAM; tells whether any was."""
        smaller = smaller_formats_of(self._inputs.model)
        is_open = self._config.format == AUTO and {loss.format for loss in self.curves.formats}.isdisjoint(smaller)
        if not is_open or not smaller or all_in_dram(found):
            return False
        most = math.log(self._floor.max_ppl_ratio)
        for name in smaller:
            if self._mixes is not None and self._mixes.expected(name) > most:
                break  # expected losses are too low, if anything, and smaller formats lose more
            self._measure_formats([name], self._dense)
            self._settle(name)
            if not self._is_good(name):
                break  # smaller formats lose more
        return True

    def _measure_heads(self, found: Sequence[Searched]) -> bool:
        """Measures smaller heads than a file's own, where the model does not fit in DRAM; tells whether any was."""
        known = {loss.format for loss in self._floor.curves.heads}  # those that lose too much, too
        names = [name for name in head_formats_of(self._inputs.model) if name not in known]
        if self._config.format != AUTO or not names or all_in_dram(found):
            return False
        most = max(self._left_by_layers)
        for name in names:
            self._steps.expect(1)
            loss = self._passes.few.head(name)
            if loss.ppl_ratio - ERRORS * error_of(loss) > most:
                break  # smaller formats lose more
            self._add(heads=(loss,))
        return True

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

    def _mix(self, found: Sequence[Searched]) -> bool:
        """Measures formats by matrix: those with which a whole model fits in DRAM, and, where they do not keep the
        quality or none fit, the smallest that do; tells whether any was measured."""
        most = self._floor.max_ppl_ratio
        is_open = self._config.format == AUTO and not math.isinf(most)
        if not is_open or self._dense != BLOCKS:
            return False
        reading = [one for one in found if one.best is None or not one.best.holds_everything]
        reading = [one for one in reading if self._may_fit(one)]
        if not reading:
            return False
        self._mixes = mixes = self._expected_mixes()

        def fits(one: Searched, sizes: Sizes) -> bool:
            return one.judge(Candidate(DENSE, mixes.formats(sizes), None, one.space.caches[0])).holds_everything

        places = [last_that_fits(mixes.path, partial(fits, one)) for one in reading]
        hopeful = {at for at in places if at >= 0 and mixes.lost[at] <= HOPEFUL * math.log(most)}
        names = {at: self._measure_mix(mixes, at) for at in sorted(hopeful)}
        for name in names.values():
            self._settle(name)
        lossy = {at: self._most_ratio(name) for at, name in names.items() if not self._is_good(name)}
        if len(hopeful) < len({*places}) or lossy:
            factors = (math.log(ratio) / mixes.parts[at][0] for at, ratio in lossy.items())
            self._measure_least_mix(mixes, max((LEAST_FACTOR, *factors)))
        return True

    def _may_fit(self, one: Searched) -> bool:
        """Tells whether attention fits in DRAM in its smallest formats; streamed attention has one format."""
        model = self._inputs.model
        smallest = {role: {names[0]: 0.0} for role, names in formats_of_matrices(model).items()}
        mixes = Mixes(model, smallest, self.curves.heads)
        kept = Candidate(DENSE, mixes.formats(mixes.path[0]), None, one.space.caches[0], one.space.kv_caches[-1])
        return one.judge(kept).refusal is None

    def _measure_least_mix(self, mixes: Mixes, factor: float) -> None:
        """Measures the smallest formats by matrix that should keep the quality beside their head, if layers lose
        `factor` times what is expected. If they lose more, tries again with the measured factor."""
        most = math.log(self._floor.max_ppl_ratio)
        for _ in range(LEAST_TRIES):
            at = mixes.first_within(most, factor)
            formats, (layers, head) = mixes.formats(mixes.path[at]), mixes.parts[at]
            name = self._measure_mix(mixes, at)
            self._measure_closer(self._floor_now.head_losses(formats), self._passes.asked_tokens)
            if self._floor_now.format_ratio(formats) <= self._floor.max_ppl_ratio < self._most_ratio(formats):
                self._remeasure(lambda loss, name=name: loss.format == name, self._passes.all_tokens, (self._dense,))
            if self._is_good(formats) or not layers:
                return
            factor = (math.log(self._most_ratio(formats)) - head) / layers

    def _measure_mix(self, mixes: Mixes, at: int) -> LayerFormats:
        """Measures formats by matrix with the usual head, unless that is done; returns the layers' formats."""
        formats, passes = mixes.layers(mixes.path[at]), self._passes.asked
        name = of_layers(formats)
        if self.curves.format_loss(name, self._dense) is None:
            self._steps.expect(1)
            loss = passes.format(formats, self._dense)
            self._add(formats=(loss.model_copy(update={"expected": mixes.losses(mixes.path[at])}),))
            self._sure[name, (self._dense,)] = passes.tokens.size
        return name

    def _expected_mixes(self) -> Mixes:
        """Returns formats by matrix with expected losses, which an interrupted run may have left."""
        self._steps.expect(1)
        model, names = self._inputs.model, formats_of_matrices(self._inputs.model)
        kept = load_arrays(self._inputs.work.once(f"expected-{self._passes.rounding.name}", self._expected))
        self._steps.add()
        effects = {role: dict(zip(names[role], kept[role].tolist(), strict=True)) for role in names}
        return Mixes(model, effects, self.curves.heads)

    def _expected(self) -> dict[str, np.ndarray]:
        """Returns the expected loss of each matrix in each of its formats, float64 [formats] by role."""
        found = sensitivities(self._passes.stream, self._passes.calibration_tokens)
        effects = expected_effects(self._inputs.model, self._passes.rounding, found, self._inputs.threads)
        names = formats_of_matrices(self._inputs.model)
        return {role: np.array([effects[role][name] for name in each]) for role, each in names.items()}

    def _settle_heads(self) -> None:
        """Measures heads, the largest first, on more tokens if few leave open whether they keep the ratio that layers
        leave. Drops the first head that loses too much, and all smaller ones, which lose more."""
        left = self._left_by_layers
        heads: list[OwnLoss] = []
        for known in self.curves.heads:
            is_open = any(_is_open(known, room) for room in left)
            loss = self._closer(known, self._passes.asked_tokens) if is_open else known
            if loss.ppl_ratio > max(left):
                break
            heads.append(loss)
        self.curves = self.curves.model_copy(update={"heads": tuple(heads)})

    @property
    def _left_by_layers(self) -> list[float]:
        """Returns the perplexity ratios that formats of layers which keep the quality leave to the head."""
        most = self._floor.max_ppl_ratio
        return [most / max(1.0, loss.ppl_ratio) for loss in self.curves.formats if loss.ppl_ratio <= most] or [most]

    def _settle_taken(self, found: Sequence[Searched]) -> bool:
        """Measures on more tokens the heads, keys and values that searches took; on the whole validation text if it is
        then still open whether all losses together keep the quality. Returns whether anything was measured, formats
        with attention on flash included."""
        known = self.curves
        self._settle_streamed(found)
        for best in (one.best for one in found if one.best is not None):
            taken: list[OwnLoss] = [
                *self._floor_now.head_losses(best.candidate.format),
                *(loss for loss in self.curves.kv_caches if loss.kv_cache == best.candidate.kv_cache),
            ]
            error = ERRORS * math.hypot(*map(error_of, taken))
            is_open = (best.ppl_ratio or 1.0) + error > self._floor.max_ppl_ratio
            is_next = is_open and all(self._tokens_of(loss) >= self._passes.asked_tokens.size for loss in taken)
            tokens = self._passes.all_tokens if is_next else self._passes.asked_tokens
            self._measure_closer(taken, tokens)
        return self.curves is not known

    def _measure_closer(self, taken: Sequence[OwnLoss], tokens: np.ndarray) -> None:
        """Measures heads, and keys and values, on more tokens; leaves `curves` as it is if there is nothing to do."""
        closer = {loss: self._closer(loss, tokens) for loss in taken}
        if any(new is not old for old, new in closer.items()):
            heads = tuple(closer.get(loss, loss) for loss in self.curves.heads)
            kv_caches = tuple(closer.get(loss, loss) for loss in self.curves.kv_caches)
            self.curves = self.curves.model_copy(update={"heads": heads, "kv_caches": kv_caches})

    def _settle_streamed(self, found: Sequence[Searched]) -> None:
        """Measures formats with attention in columns, too, where searches take attention on flash; if they lose too
        much, measures the next larger format."""
        best = [one.best for one in found if one.best is not None]
        self._streamed |= {of_layers(one.candidate.format) for one in best if one.candidate.streams_attention}
        tokens, families = self._passes.all_tokens, (self._dense, *ATTENTION)
        if not self._streamed or self._remeasure(lambda loss: loss.format in self._streamed, tokens, families):
            return
        known = {loss.format for loss in self.curves.formats}
        larger = [name for name in larger_formats_of(self._inputs.model) if name not in known]
        is_kept = len(best) == len(found) and all(self._is_good(of_layers(one.candidate.format)) for one in best)
        if not is_kept and larger and self._config.format == AUTO:
            self._measure_formats(larger[:1], self._dense)

    def _settle(self, name: LayerFormats) -> None:
        """Measures a format on more tokens where few leave open whether it keeps the quality; on the whole validation
        text only if it then still may: one that seems to lose too much is not worth the time."""
        most, passes = self._floor.max_ppl_ratio, self._passes
        if any(loss.format == name and _is_open(loss, most) for loss in self.curves.formats):
            self._remeasure(lambda loss: loss.format == name, passes.asked_tokens, (self._dense,))
            self._remeasure(
                lambda loss: loss.format == name and loss.ppl_ratio <= most, passes.all_tokens, (self._dense,)
            )

    def _measure_formats(self, names: Sequence[Formats], family: FamilyName) -> None:
        self._steps.expect(len(names))
        self._add(formats=tuple(self._passes.few.format(name, family) for name in names))

    def _remeasure(
        self, is_asked: Callable[[FormatLoss], bool], tokens: np.ndarray, families: tuple[FamilyName, ...]
    ) -> bool:
        """Measures again, on more tokens or in more families' slices, the formats that `is_asked` selects; tells if any
        was."""
        losses = {(loss.format, loss.family): loss for loss in self.curves.formats}
        family, *others = families
        names = [
            name
            for (name, own), loss in losses.items()
            if own == family and is_asked(loss) and self._sure.get((name, families), 0) < tokens.size
        ]
        if not names or (tokens.size <= self._passes.few_tokens.size and not others):
            return False
        self._sure |= {(name, families): tokens.size for name in names}
        self._steps.expect(len(names))
        passes = self._passes.on(tokens)
        for name in names:
            known = losses[name, family]
            loss = passes.format(known.formats, *families)
            losses[name, family] = loss.model_copy(update={"expected": known.expected})
        self.curves = self.curves.model_copy(update={"formats": tuple(losses.values())})
        return True

    def _closer(self, known: OwnLoss, tokens: np.ndarray) -> OwnLoss:
        """Measures a head, or keys and values, on more tokens, unless it was measured on as many or loses nothing."""
        if self._tokens_of(known) >= tokens.size or not is_rough(known):
            return known
        self._sure_own[_name(known)] = tokens.size
        self._steps.expect(1)
        passes = self._passes.on(tokens)
        return passes.head(known.format) if isinstance(known, HeadLoss) else passes.kv_cache(known.kv_cache)

    def _tokens_of(self, loss: OwnLoss) -> int:
        return self._sure_own.get(_name(loss), self._passes.few_tokens.size)

    def _is_good(self, name: Formats) -> bool:
        return self._most_ratio(name) <= self._floor.max_ppl_ratio

    def _most_ratio(self, name: Formats) -> float:
        return self._floor_now.most_format_ratio(name)

    @property
    def _floor_now(self) -> Floor:
        return replace(self._floor, curves=self.curves)

    def _add(self, **found: tuple[Any, ...]) -> None:
        self.curves = self.curves.model_copy(
            update={name: (*getattr(self.curves, name), *values) for name, values in found.items()}
        )

    def _on(self, curves: Curves) -> tuple[AllocationInputs, Floor]:
        return replace(self._inputs, curves=curves), replace(self._floor, curves=curves)


def smallest_first(losses: Sequence[FormatLoss], family: FamilyName) -> list[LayerFormats]:
    own = (loss.format for loss in losses if loss.family == family)
    return sorted(own, key=lambda one: (sample_bytes(one), str(one)))


def _name(loss: OwnLoss) -> str:
    return f"head {loss.format}" if isinstance(loss, HeadLoss) else f"kv_cache {loss.kv_cache}"


def is_rough(loss: Loss) -> bool:
    return error_of(loss) > LEAST_ERROR


def _is_open(loss: Loss, max_ratio: float) -> bool:
    """Tells whether the ratio lies within ERRORS standard errors, so that more text may change the verdict."""
    error = ERRORS * error_of(loss)
    return loss.ppl_ratio - error <= max_ratio < max(1.0, loss.ppl_ratio) + error


def all_in_dram(found: Sequence[Searched]) -> bool:
    return all(one.best is not None and one.best.holds_everything for one in found)


def unmeasured(config: AllocateConfig, curves: Curves, family: FamilyName) -> list[FormatName]:
    """Returns the formats that the user named and `explore` left out; none where no format's loss is known."""
    named = () if config.format == AUTO or not curves.formats else dict.fromkeys(slice_formats(config.format))
    return [name for name in named if curves.format_loss(name, family) is None]
