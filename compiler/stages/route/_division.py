"""Divides a quality budget among layers: how much each router prefers experts in DRAM, for the fewest missing units.

In each layer a larger strength misses less and errs more. Errors of single layers nearly add up, so that the best
divisions give every layer the strength at which another missing unit costs the same error (a Lagrange multiplier):
steps along each layer's convex hull, the cheapest first. Shape letters: L layers, S strengths.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

TINY = 1e-30
"""Stands for errors of 0 in ratios."""


class Step(NamedTuple):
    per_error: float
    """Misses saved, over the error that it adds."""
    layer: int
    strength: int
    """The index of the strength."""
    before: int
    """The index of the strength before it."""
    error: float
    """Its addition to the sum of errors."""


@dataclass(frozen=True)
class Effects:
    """Effects of strengths in each layer, while the others route as the model was trained to."""

    strengths: np.ndarray
    """float64 [S], ascending from 0."""
    errors: np.ndarray
    """float64 [L, S]: the squared error of the hidden states after the layer, over them, on average over tokens."""
    misses: np.ndarray
    """int64 [L, S]: units that tokens used and DRAM did not hold."""

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps of all layers, those that save the most misses for their error first."""
        found = [step for layer in range(len(self.errors)) for step in self._of_layer(layer)]
        return tuple(sorted(found, key=lambda step: (-step.per_error, step.layer, step.strength)))

    @property
    def largest_error(self) -> float:
        return sum(step.error for step in self.steps)

    def divided(self, error: float) -> np.ndarray:
        """Returns strengths float64 [L] whose errors sum to `error`: the first steps, and a part of the next one."""
        found, left = np.zeros(len(self.errors)), error
        for step in self.steps:
            share = min(1.0, left / step.error) if step.error > 0 else 1.0
            low, high = self.strengths[[step.before, step.strength]]
            found[step.layer] = low + share * (high - low)
            left -= step.error
            if left <= 0:
                break
        return found

    def _of_layer(self, layer: int) -> list[Step]:
        """Returns the steps along a layer's convex hull, from strength 0, by falling savings for their error."""
        errors, misses, found, now = self.errors[layer], self.misses[layer], [], 0
        while True:
            further = [
                Step(float(misses[now] - misses[at]) / max(float(errors[at] - errors[now]), TINY), layer, at, now, 0.0)
                for at in range(now + 1, errors.size)
                if misses[at] < misses[now]
            ]
            if not further:
                return found
            best = max(further, key=lambda step: (step.per_error, step.strength))
            found.append(best._replace(error=max(0.0, float(errors[best.strength] - errors[now]))))
            now = best.strength
