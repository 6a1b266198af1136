"""Reads quality curves: the lowest density at which a selector keeps the quality that is asked for.

Measured ratios of perplexity scatter. A curve that never rises with density is fitted to them (isotonic regression,
weighted by their errors), with no loss at a density of 1. Between two densities it is interpolated. A density or format
keeps the floor if its ratio plus one standard error does, since the artifact is finally judged on other text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from coldpress.compiler.candidates import DENSE
from coldpress.compiler.cost_model import tensor_bytes
from coldpress.runtime.dram.kv_cache import DEFAULT_KV_CACHE
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.curves import Curve, Curves, HeadLoss, Loss, RoutingCurve
from coldpress.schemas.families import (
    BLOCKS,
    WHOLE_MLP,
    FamilyName,
    Formats,
    HeadFormat,
    Method,
    head_of,
    names_in,
    of_layers,
    with_head,
)
from coldpress.schemas.layout import KvCacheFormat, RoutingName
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.sparsity import SearchedRouting

STEP = 0.01
"""Densities are rounded up to multiples of this, and strengths of routing down; curves are no more exact."""
STRENGTHS = 3
"""Strengths of a routing that a search compares: the largest that keeps the floor, and its halves, which lose less."""
AnyCurve = TypeVar("AnyCurve", Curve, RoutingCurve)
LEAST_ERROR = 1e-3
"""Least standard error in the weights of the fit: otherwise one lucky point would outweigh all others."""


@dataclass(frozen=True)
class Floor:
    curves: Curves
    max_ppl_ratio: float

    def format_ratio(self, formats: Formats, method: Method = DENSE) -> float:
        """Returns the perplexity ratio of formats in the slices of a method's units, all units used; at least 1, since
        lucky rounding is no gain. It multiplies the losses of layers and head, which `verify` checks."""
        return math.prod(max(1.0, loss.ppl_ratio) for loss in self._losses(formats, method))

    def most_format_ratio(self, formats: Formats, method: Method = DENSE) -> float:
        """Returns the perplexity ratio of formats with one standard error added."""
        return self.format_ratio(formats, method) + math.hypot(*map(error_of, self._losses(formats, method)))

    def family(self, method: Method) -> FamilyName:
        is_whole = load("coldpress.runtime.sparsity", Selector, method).is_whole
        return BLOCKS if is_whole and any(loss.family == BLOCKS for loss in self.curves.formats) else WHOLE_MLP

    def is_known(self, formats: Formats, method: Method) -> bool:
        """Tells whether layers' formats, or each of them, were measured in a method's slices, or no format was."""
        family = self.family(method)
        names = {loss.format for loss in self.curves.formats if loss.family == family}
        return not self.curves.formats or of_layers(formats) in names or names_in(of_layers(formats)) <= names

    def _losses(self, formats: Formats, method: Method) -> list[Loss]:
        """Returns the known losses of layers' formats (of an unmeasured mix, the worst format's) and of the head."""
        family, layers = self.family(method), of_layers(formats)
        known = [loss for loss in [self.curves.format_loss(layers, family)] if loss is not None]
        if not known:
            each = (self.curves.format_loss(name, family) for name in names_in(layers))
            known = sorted((loss for loss in each if loss is not None), key=lambda loss: loss.ppl_ratio)
        return [*known[-1:], *self.head_losses(formats)]

    def head_losses(self, formats: Formats) -> list[HeadLoss]:
        head = head_of(formats)
        return [loss for loss in self.curves.heads if head is not None and loss.format == head.format]

    def with_heads(self, layers: Formats, spec: ModelSpec) -> list[Formats]:
        """Combines layers' formats with each measured head format that is smaller than the usual one and keeps the
        floor; returns none without a floor."""
        most_bytes = tensor_bytes(spec.head_role, (spec.hidden_size,), layers)
        heads = [HeadFormat(role=spec.head_role, format=loss.format) for loss in self.curves.heads]
        found = [with_head(layers, head) for head in heads]
        return [
            one
            for one in found
            if tensor_bytes(spec.head_role, (spec.hidden_size,), one) < most_bytes
            and self.most_format_ratio(one) <= self.max_ppl_ratio < math.inf
        ]

    def kv_cache_ratio(self, name: KvCacheFormat) -> float | None:
        """Returns the perplexity ratio of a format of keys and values, at least 1; None if nobody knows."""
        if name == DEFAULT_KV_CACHE:
            return 1.0
        return next((max(1.0, loss.ppl_ratio) for loss in self.curves.kv_caches if loss.kv_cache == name), None)

    def formats(self, names: Sequence[Formats]) -> tuple[Formats, ...]:
        """Returns the formats of a dense run that keep the floor with all units used; the best, if none does."""
        most = max(self.max_ppl_ratio, min(map(self.most_format_ratio, names)))
        return tuple(name for name in names if self.most_format_ratio(name) <= most)

    def least_density(self, method: Method, name: Formats, resident_share: float = 0.0) -> float | None:
        """Returns the lowest density that keeps the floor, or None; `resident_share`: share of the units in DRAM."""
        found = [
            least_density(curve, self.max_ppl_ratio / self.most_format_ratio(name, method))
            for curve in self._around(method, resident_share)
        ]
        densities = [density for density in found if density is not None]
        return max(densities) if densities and len(densities) == len(found) else None

    def ratio(self, method: Method, name: Formats, density: float, resident_share: float = 0.0) -> float | None:
        """Multiplies the losses of selector and format; None if nobody knows one of them."""
        if curves := self._around(method, resident_share):
            return self.format_ratio(name, method) * max(ratio_at(curve, density) for curve in curves)
        selector = load("coldpress.runtime.sparsity", Selector, method)
        return (
            self.format_ratio(name, method)
            if selector.EXACT or selector.NEEDS_PREDICTORS or selector.is_whole
            else None
        )

    def routings(
        self, name: RoutingName, formats: Formats, resident_share: float, most_kld: float
    ) -> list[SearchedRouting]:
        """Returns the largest strength that keeps the floor and diverges by at most `most_kld`, and its halves, which
        read more. None where the floor is open, or if the routing was not measured."""
        curves = self._routing_curves(name, resident_share)
        if not curves or math.isinf(self.max_ppl_ratio):
            return []
        room = self.max_ppl_ratio / self.most_format_ratio(formats)
        largest = min(largest_strength(curve, room, most_kld) for curve in curves)
        strengths = {round(largest / 2**halved, 6) for halved in range(STRENGTHS)} - {0.0}
        return [
            SearchedRouting(routing=name, strength=strength, mean_kld=max(kld_at(curve, strength) for curve in curves))
            for strength in sorted(strengths, reverse=True)
        ]

    def routing_ratio(self, routing: SearchedRouting, resident_share: float) -> float:
        curves = self._routing_curves(routing.routing, resident_share)
        fits = map(_fit_routing, curves)
        return max(float(np.interp(routing.strength, strengths, ratios)) for strengths, ratios, _, _ in fits)

    def _routing_curves(self, name: RoutingName, resident_share: float) -> tuple[RoutingCurve, ...]:
        return _nearest([curve for curve in self.curves.routings if curve.routing == name], resident_share)

    def why_unexplored(self, method: Method) -> str | None:
        """Returns why a selector has no curve, such as in an older build's record; None if it has one or needs none."""
        selector = load("coldpress.runtime.sparsity", Selector, method)
        if self.curves.of(method) or selector.EXACT or selector.NEEDS_PREDICTORS or selector.is_whole:
            return None
        reasons = (found.reason for found in self.curves.unexplored if found.method == method)
        return next(reasons, "these quality curves lack it; explore=whole measures it")

    def _around(self, method: Method, resident_share: float) -> tuple[Curve, ...]:
        """Returns the curves at the nearest resident shares below and above; callers count the worse one."""
        return _nearest(self.curves.of(method), resident_share)


def error_of(loss: Loss) -> float:
    return loss.ppl_ratio_error or 0.0


def _nearest(curves: Sequence[AnyCurve], resident_share: float) -> tuple[AnyCurve, ...]:
    below = [curve for curve in curves if (curve.resident_share or 0.0) <= resident_share]
    above = [curve for curve in curves if (curve.resident_share or 0.0) > resident_share]
    return (*below[-1:], *above[:1])


def ratio_at(curve: Curve, density: float) -> float:
    densities, ratios, _ = _fitted(curve)
    return float(np.interp(density, densities, ratios))


def least_density(curve: Curve, max_ratio: float) -> float | None:
    """Returns the lowest measured or interpolated density whose ratio is at most `max_ratio` with its error added,
    rounded up to STEP; None if only a density of 1 has it."""
    densities, ratios, errors = _fitted(curve)
    candidates = np.arange(math.ceil(densities[0] / STEP - 1e-9), round(1 / STEP)) * STEP
    good = candidates[np.interp(candidates, densities, ratios + errors) <= max_ratio]
    return round(float(good[0]), 6) if good.size else None


def largest_strength(curve: RoutingCurve, max_ratio: float, max_kld: float) -> float:
    """Returns the largest measured or interpolated strength whose ratio of perplexity is at most `max_ratio` and whose
    divergence is at most `max_kld`, their errors added; 0 if none is."""
    strengths, ratios, errors, klds = _fit_routing(curve)
    candidates = np.arange(1, round(strengths[-1] / STEP) + 1) * STEP
    good = (np.interp(candidates, strengths, ratios + errors) <= max_ratio) & (
        np.interp(candidates, strengths, klds) <= max_kld
    )
    return round(float(candidates[good][-1]), 6) if good.any() else 0.0


def kld_at(curve: RoutingCurve, strength: float) -> float:
    """Returns the divergence at a strength, its error added."""
    strengths, _, _, klds = _fit_routing(curve)
    return float(np.interp(strength, strengths, klds))


def _fit_routing(curve: RoutingCurve) -> tuple[np.ndarray, ...]:
    """Returns strengths from 0, ratios that never fall, their errors, and divergences with theirs, float64 [n] each."""
    fitted = _monotone([point.ppl_ratio for point in curve.points], [point.ppl_ratio_error for point in curve.points])
    found = np.array(
        [
            (point.strength, ratio, point.ppl_ratio_error or 0.0, point.mean_kld + (point.mean_kld_error or 0.0))
            for point, ratio in zip(curve.points, fitted, strict=True)
        ]
    )
    return tuple(np.vstack([(0.0, 1.0, 0.0, 0.0), found]).T)


def _monotone(ratios: Sequence[float], errors: Sequence[float | None], *, increasing: bool = True) -> np.ndarray:
    """Returns ratios that never fall, or never rise, at least 1, float64 [n]: the nearest to those measured."""
    from scipy.optimize import isotonic_regression  # what scikit-learn's class calls, without half a second of imports

    weights = 1 / np.maximum([error or 0.0 for error in errors], LEAST_ERROR) ** 2
    return np.maximum(isotonic_regression(ratios, weights=weights, increasing=increasing).x, 1.0)


def _fitted(curve: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    known: Any = curve  # records are frozen, thus hashable, which type checkers do not see
    return _fit(known)


@lru_cache(maxsize=1024)  # a search asks for a curve with every budget, format and density
def _fit(curve: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns densities up to 1, which loses nothing, ratios that never rise, and their errors, float64 [n] each."""
    densities = np.array([point.density for point in curve.points])
    known = np.array([point.ppl_ratio_error or 0.0 for point in curve.points])
    measured = [point.ppl_ratio for point in curve.points]
    ratios = _monotone(measured, [point.ppl_ratio_error for point in curve.points], increasing=False)
    return np.append(densities, 1.0), np.append(ratios, 1.0), np.append(known, 0.0)
