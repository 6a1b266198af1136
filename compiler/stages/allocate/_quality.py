"""Reads quality curves: the lowest density at which a selector keeps the quality that is asked for.

Measured ratios of perplexity scatter. A curve that never rises with density is fitted to them (isotonic regression,
weighted by their errors), with no loss at a density of 1. Between two densities it is interpolated. A density keeps the
floor if its ratio does with one standard error added: the artifact is judged on other text at the end. A curve of units
that are refined in planes includes the loss of its format, and was measured up to a density of 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from coldpress.compiler.stages.allocate._mixtures import mixed, saved_share
from coldpress.runtime.plan.kv_cache import DEFAULT_KV_CACHE
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization._planes import coarsest, finer_layers, in_words, whole_format
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.curves import Curve, Curves
from coldpress.schemas.families import FormatName, Formats, Method
from coldpress.schemas.layout import KvCacheFormat

STEP = 0.01
"""Densities are rounded up to multiples of this; finer ones would pretend to an accuracy that curves do not have."""
LEAST_ERROR = 1e-3
"""Smallest error of a ratio that counts: a point of one lucky text would outweigh all others."""


@dataclass(frozen=True)
class Floor:
    """The most perplexity, over the source's, that an artifact may have; the format uses up part of it."""

    curves: Curves
    max_ppl_ratio: float

    def format_ratio(self, formats: Formats) -> float:
        """Returns the perplexity ratio of a format, all units used; at least 1, since a lucky rounding is no credit. Of
        several formats, the largest."""
        if not isinstance(formats, str):
            return max(map(self.format_ratio, set(formats)))
        name = formats
        loss = self.curves.draft(name) or self.curves.format_loss(whole_format(name))
        return 1.0 if loss is None else max(1.0, loss.ppl_ratio)

    def kv_cache_ratio(self, name: KvCacheFormat) -> float | None:
        """Returns the perplexity ratio of a format of keys and values, at least 1; None if nobody knows."""
        if name == DEFAULT_KV_CACHE:
            return 1.0
        return next((max(1.0, loss.ppl_ratio) for loss in self.curves.kv_caches if loss.kv_cache == name), None)

    def formats(self, names: Sequence[FormatName]) -> tuple[FormatName, ...]:
        """Returns the formats that keep the floor with all units used; the best, if none does."""
        most = max(self.max_ppl_ratio, min(map(self.format_ratio, names)))
        return tuple(name for name in names if self.format_ratio(name) <= most)

    def least_density(self, method: Method, name: Formats, resident_share: float = 0.0) -> float | None:
        """Returns the lowest density at which a selector with curves keeps the floor in a format; None if none does.

        `resident_share` is the share of the units that DRAM holds, for a selector that sees residency.
        """
        found = [
            least_density(curve, self.max_ppl_ratio / self._besides(curve, name))
            for curve in self._around(method, name, resident_share)
        ]
        densities = [density for density in found if density is not None]
        return max(densities) if densities and len(densities) == len(found) else None

    def ratio(self, method: Method, name: Formats, density: float, resident_share: float = 0.0) -> float | None:
        """Returns the artifact's perplexity ratio to expect; None if nobody knows: losses of selector and format
        multiply."""
        if curves := self._around(method, name, resident_share):
            return max(self._besides(curve, name) * ratio_at(curve, density) for curve in curves)
        selector = load("coldpress.runtime.sparsity", Selector, method)
        return self.format_ratio(name) if selector.EXACT or selector.NEEDS_PREDICTORS or selector.is_whole else None

    def why_unexplored(self, method: Method, name: Formats) -> str | None:
        """Returns why a selector that loses something has no curve in a format; None if it has one, or loses nothing.

        Curves of an older build may lack selectors and formats that came later.
        """
        selector = load("coldpress.runtime.sparsity", Selector, method)
        if self.of(method, name) or selector.EXACT or selector.NEEDS_PREDICTORS or selector.is_whole:
            return None
        reasons = (found.reason for found in self.curves.unexplored if found.method == method)
        return next(reasons, f"these quality curves lack it in {in_words(name)}; build again to measure it")

    def _besides(self, curve: Curve, name: Formats) -> float:
        """Returns the perplexity ratio of a format that a curve does not include."""
        return self.format_ratio(name) if curve.format is None else 1.0

    def of(self, method: Method, name: Formats) -> list[Curve]:
        """Returns a selector's curves that hold in a format; of a mixture, those between its two formats."""
        if not isinstance(name, str):
            coarser, finer = coarsest(name), next(name[layer] for layer in finer_layers(name))
            return mixed(self.of(method, coarser), self.of(method, finer), saved_share(self.curves, name))
        return [curve for curve in self.curves.of(method) if curve.format in (None, name)]

    def _around(self, method: Method, name: Formats, resident_share: float) -> tuple[Curve, ...]:
        """Returns the curves of the nearest measured resident shares: one below and one above. The worse one
        counts, since nothing is known between them."""
        curves = self.of(method, name)
        below = [curve for curve in curves if (curve.resident_share or 0.0) <= resident_share]
        above = [curve for curve in curves if (curve.resident_share or 0.0) > resident_share]
        return (*below[-1:], *above[:1])


def ratio_at(curve: Curve, density: float) -> float:
    """Returns the perplexity ratio at a density, which may lie between the measured ones."""
    densities, ratios, _ = _fitted(curve)
    return float(np.interp(density, densities, ratios))


def least_density(curve: Curve, max_ratio: float) -> float | None:
    """Returns the lowest measured or interpolated density whose ratio is at most `max_ratio` with its error added,
    rounded up to STEP; None if only a density of 1 has it."""
    densities, ratios, errors = _fitted(curve)
    candidates = np.arange(math.ceil(densities[0] / STEP - 1e-9), round(1 / STEP)) * STEP
    good = candidates[np.interp(candidates, densities, ratios + errors) <= max_ratio]
    return round(float(good[0]), 6) if good.size else None


def _fitted(curve: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    known: Any = curve  # records are frozen, thus hashable, which type checkers do not see
    return _fit(known)


@lru_cache(maxsize=1024)  # a search asks for a curve with every budget, format and density
def _fit(curve: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns densities, ratios that never rise, and their errors, float64 [n] each, up to a density of 1: without
    loss, where it was not measured."""
    from scipy.optimize import isotonic_regression  # what scikit-learn's class calls, without half a second of imports

    densities = np.array([point.density for point in curve.points])
    known = np.array([point.ppl_ratio_error or 0.0 for point in curve.points])
    weights = 1 / np.maximum(known, LEAST_ERROR) ** 2
    fitted = isotonic_regression([point.ppl_ratio for point in curve.points], weights=weights, increasing=False)
    ratios = np.maximum(fitted.x, 1.0)
    if densities[-1] == 1:
        return densities, ratios, known
    return np.append(densities, 1.0), np.append(ratios, 1.0), np.append(known, 0.0)
