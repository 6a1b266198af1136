"""DIP's rule (B.1) for the families of any selector: equal densities in all layers, and a line between logits of
densities.

The search starts from the whole model: at each step it prunes the family that adds the least divergence per byte. Every
density tried is a point of memory and loss. On the Pareto front of these points, the logit of each family's density is
fitted as a linear function of the logit of the overall density. At the wanted density, all logits shift by the amount
that makes the mean exact. The paper searches a plane of two densities; a path needs no more runs with four families
than a plane with two.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.compiler.density_allocation import Rule, RuleTask, Shares

LOG = logging.getLogger(__name__)
STEP = 0.85
"""A family's density in a step, over its density before."""
LARGEST_LOGIT = math.log(99.0)
"""Clamps densities below 0.01 or above 0.99."""


@dataclass(frozen=True)
class DensityPoint:
    density: float
    """Share of all bytes."""
    loss: float
    by_family: dict[str, float]


class Plugin(Rule):
    def num_variants(self, num_layers: int, num_families: int) -> int:
        return num_families

    def densities(self, task: RuleTask) -> Shares:
        lines = fitted_lines(pareto_front(_searched(task)))
        for family, (slope, offset) in lines.items():
            LOG.info(
                "allocate: logit of the density of %s = %.3f * logit of the overall density + %.3f",
                family,
                slope,
                offset,
            )
        return task.whole_units(task.same(_exact(task, lines)))


def _searched(task: RuleTask) -> list[DensityPoint]:
    now, found = DensityPoint(1.0, 0.0, dict.fromkeys(task.num_units, 1.0)), []
    while now.density > STEP * task.density:
        tried = [{**now.by_family, family: STEP * share} for family, share in now.by_family.items()]
        losses = task.losses().of([task.same(by_family) for by_family in tried])
        points = [
            DensityPoint(task.mean(task.same(by_family)), loss, by_family)
            for by_family, loss in zip(tried, losses, strict=True)
        ]
        found += points
        now = min(points, key=lambda point: (point.loss - now.loss) / (now.density - point.density))
    return found


def pareto_front(points: Sequence[DensityPoint]) -> list[DensityPoint]:
    """Returns the points that no other beats in memory without losing in loss, by ascending density."""
    front: list[DensityPoint] = []
    for point in sorted(points, key=lambda point: (point.density, point.loss), reverse=True):
        while front and front[-1].loss >= point.loss:
            front.pop()
        front.append(point)
    return front[::-1]


def fitted_lines(front: Sequence[DensityPoint]) -> dict[str, tuple[float, float]]:
    """Returns family -> (slope, offset) of the logit of its density over the overall logit, by least squares."""
    of_all = [_logit(point.density) for point in front]
    found = {}
    for family in front[0].by_family:
        of_family = [_logit(point.by_family[family]) for point in front]
        slope, offset = np.polyfit(of_all, of_family, 1) if len(front) > 1 else (1.0, of_family[0] - of_all[0])
        found[family] = float(slope), float(offset)
    return found


def _exact(task: RuleTask, lines: dict[str, tuple[float, float]]) -> dict[str, float]:
    wanted = _logit(task.density)
    low, high = -4 * LARGEST_LOGIT, 4 * LARGEST_LOGIT
    found: dict[str, float] = {}
    for _ in range(60):
        shift = (low + high) / 2
        found = {
            family: 1 / (1 + math.exp(-slope * wanted - offset - shift)) for family, (slope, offset) in lines.items()
        }
        low, high = (low, shift) if task.mean(task.same(found)) > task.density else (shift, high)
    return found


def _logit(share: float) -> float:
    value = math.log(max(share, 1e-9) / max(1 - share, 1e-9))
    return min(max(value, -LARGEST_LOGIT), LARGEST_LOGIT)
