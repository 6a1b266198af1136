"""Says which matrices keep a finer coarse plane in DRAM, and what a mixture of two formats in planes loses.

A matrix's gain is measured (compiler/quality/gains.py), and the finer plane takes as many bytes in every matrix:
so the matrices with the largest gains come first, which is the greedy choice by loss saved per byte. Gains nearly add
up: a mixture saves that share of the loss between its two formats which its matrices have of all gains
(docs/experiments/planes.md).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from coldpress.runtime.quantization._planes import coarsest, finer_matrices
from coldpress.schemas.curves import Curve, Curves, LayerGains, Loss, Point
from coldpress.schemas.families import Formats, UnitFormat, unit_format
from coldpress.schemas.model import MLP_ROLES

SHARES = (0.25, 0.5, 0.75)
"""Shares of the matrices that the search gives the finer plane, beside as many as fit the budget."""


def mixture(gains: LayerGains, count: int) -> tuple[UnitFormat, ...]:
    """Gives the finer format to the `count` matrices with the largest gains, of equal ones the first."""
    known = np.array(gains.rows)
    finer = np.zeros(known.size, bool)
    finer[np.argsort(-known, axis=None, kind="stable")[:count]] = True
    return tuple(
        unit_format([gains.finer if one else gains.coarser for one in row]) for row in finer.reshape(known.shape)
    )


def mixtures(gains: LayerGains, fits: Callable[[Formats], bool]) -> list[tuple[UnitFormat, ...]]:
    """Returns the mixtures that a search compares: with shares of the matrices in the finer format, and with as many as
    the budget holds; none if no matrix gains anything."""
    known = np.array(gains.rows)
    if not (known > 0).any():
        return []
    most = bisect_left(range(1, known.size), True, key=lambda count: not fits(mixture(gains, count)))
    counts = {min(most, round(share * known.size)) for share in SHARES} | {most}
    return [mixture(gains, count) for count in sorted(counts) if count > 0]


def saved_share(curves: Curves, formats: Formats) -> float:
    """Returns which share of the loss between its two formats a mixture saves, from 0 to 1."""
    gains = curves.gains(coarsest(formats))
    if gains is None:
        return 0.0
    worth = np.maximum(gains.rows, 0.0)
    roles = MLP_ROLES[-worth.shape[1] :]
    saved = sum(worth[layer, roles.index(role)] for layer, role in finer_matrices(formats, roles))
    return float(saved / worth.sum()) if worth.any() else 0.0


def mixed(coarser: Sequence[Curve], finer: Sequence[Curve], share: float) -> list[Curve]:
    """Returns the curves of a mixture that saves `share` of the loss: between those of its formats that were measured
    with equal residency and at equal densities."""
    found: list[Curve] = []
    for one in coarser:
        other = next((curve for curve in finer if curve.resident_share == one.resident_share), None)
        points = {} if other is None else {point.density: point for point in other.points}
        pairs = [(point, points[point.density]) for point in one.points if point.density in points]
        between = tuple(_between(*pair, share) for pair in pairs)
        found += [one.model_copy(update={"points": between})] if between else []
    return found


def _between(coarser: Point, finer: Point, share: float) -> Point:
    def mean(name: str) -> float:
        return (1 - share) * (getattr(coarser, name) or 0.0) + share * (getattr(finer, name) or 0.0)

    return coarser.model_copy(update={name: mean(name) for name in Loss.model_fields})
