"""Reads quality curves: the lowest density at which a selector keeps the quality that is asked for.

Measured ratios of perplexity scatter. A curve that never rises with density is fitted to them (isotonic regression,
weighted by their errors), with no loss at a density of 1. Between two densities it is interpolated.
"""

import math
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.curves import Curve, Curves
from coldpress.schemas.families import FormatName, Method

STEP = 0.01
"""Densities are rounded up to multiples of this; finer ones would pretend to an accuracy that curves do not have."""
LEAST_ERROR = 1e-3
"""Smallest error of a ratio that counts: a point of one lucky text would outweigh all others."""


@dataclass(frozen=True)
class Floor:
    """The most perplexity, over the source's, that an artifact may have; the format uses up part of it."""

    curves: Curves
    max_ppl_ratio: float
    format: FormatName

    @property
    def format_ratio(self) -> float:
        """The perplexity ratio of the format, all units used; at least 1, since a lucky rounding is no credit."""
        loss = self.curves.format_loss(self.format)
        return 1.0 if loss is None else max(1.0, loss.ppl_ratio)

    def least_density(self, method: Method) -> float | None:
        """Returns the lowest density at which a selector with a curve keeps the floor; None if none does."""
        curve = self.curves.curve(method)
        assert curve is not None
        return least_density(curve, self.max_ppl_ratio / self.format_ratio)

    def ratio(self, method: Method, density: float) -> float | None:
        """Returns the artifact's perplexity ratio to expect; None if nobody knows: losses of selector and format
        multiply."""
        if (curve := self.curves.curve(method)) is not None:
            return self.format_ratio * ratio_at(curve, density)
        selector = load("coldpress.runtime.sparsity", Selector, method)
        return self.format_ratio if selector.EXACT or selector.NEEDS_PREDICTORS else None

    def why_unexplored(self, method: Method) -> str | None:
        """Returns why a selector that loses something has no curve; None if it has one, or loses nothing."""
        if self.curves.curve(method) is not None or self.ratio(method, 1.0) is not None:
            return None
        return next(found.reason for found in self.curves.unexplored if found.method == method)


def ratio_at(curve: Curve, density: float) -> float:
    """Returns the perplexity ratio at a density, which may lie between the measured ones."""
    densities, ratios = _fitted(curve)
    return float(np.interp(density, densities, ratios))


def least_density(curve: Curve, max_ratio: float) -> float | None:
    """Returns the lowest measured or interpolated density whose ratio is at most `max_ratio`, rounded up to STEP; None
    if only a density of 1 has it."""
    densities, ratios = _fitted(curve)
    candidates = np.arange(math.ceil(densities[0] / STEP - 1e-9), round(1 / STEP)) * STEP
    good = candidates[np.interp(candidates, densities, ratios) <= max_ratio]
    return round(float(good[0]), 6) if good.size else None


def _fitted(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Returns densities and ratios that never rise, both float64 [n], up to a density of 1 without loss."""
    from sklearn.isotonic import IsotonicRegression

    densities = np.array([point.density for point in curve.points])
    errors = np.array([point.ppl_ratio_error or LEAST_ERROR for point in curve.points])
    weights = 1 / np.maximum(errors, LEAST_ERROR) ** 2
    fitted = IsotonicRegression(increasing=False, y_min=1.0).fit(
        densities, np.array([point.ppl_ratio for point in curve.points]), sample_weight=weights
    )
    ratios = np.asarray(fitted.predict(densities))
    return np.append(densities, 1.0), np.append(ratios, 1.0)
