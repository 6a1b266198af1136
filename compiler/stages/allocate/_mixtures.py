"""Says which layers keep a finer coarse plane in DRAM, and what a mixture of two formats in planes loses.

A layer's gain is measured (compiler/stages/explore/gains.py), and the finer plane takes as many bytes in every layer:
so the layers with the largest gains come first, which is the greedy choice by loss saved per byte. Gains nearly add up:
a mixture saves that share of the loss between the two formats which its layers have of all gains
(docs/experiments/planes.md).
"""

from collections.abc import Sequence

import numpy as np

from coldpress.runtime.quantization._planes import coarsest, finer_layers
from coldpress.schemas.curves import Curve, Curves, LayerGains, Loss, Point
from coldpress.schemas.families import FormatName, Formats

SHARES = (0.25, 0.5, 0.75)
"""Shares of the layers that the search gives the finer plane, beside as many as fit the budget."""


def mixture(gains: LayerGains, count: int) -> tuple[FormatName, ...]:
    """Returns each layer's format if `count` layers have the finer one: those with the largest gains, of equal ones the
    first."""
    finer = set(sorted(range(len(gains.per_layer)), key=lambda layer: -gains.per_layer[layer])[:count])
    return tuple(gains.finer if layer in finer else gains.coarser for layer in range(len(gains.per_layer)))


def mixtures(gains: LayerGains, most: int) -> list[tuple[FormatName, ...]]:
    """Returns the mixtures that a search compares; each gives at most `most` layers the finer format.

    There are none if no layer gains anything: then no order of layers is better than another."""
    layers = len(gains.per_layer)
    if not any(gain > 0 for gain in gains.per_layer):
        return []
    counts = {min(most, round(share * layers)) for share in SHARES} | {min(most, layers - 1)}
    return [mixture(gains, count) for count in sorted(counts) if 0 < count < layers]


def saved_share(curves: Curves, formats: Formats) -> float:
    """Returns which share of the loss between its two formats a mixture saves, from 0 to 1."""
    gains = curves.gains(coarsest(formats))
    if gains is None:
        return 0.0
    worth = np.maximum(gains.per_layer, 0.0)
    return float(worth[list(finer_layers(formats))].sum() / worth.sum()) if worth.any() else 0.0


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
