"""Divides bytes among layers: starts from the smallest predictor, or format, of each, and spends each byte where it
saves most. Pure: bytes and effects go in, positions among the choices come out. Effects of layers are assumed to add
up; the caller measures the true effect of all together."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Sizes = tuple[int, ...]
"""Per layer, the position of its predictor, or format, among its choices."""


@dataclass(frozen=True)
class LayerOptions:
    """The choices for one layer: the smallest first."""

    nbytes: tuple[int, ...]
    effect: tuple[float, ...]
    """Effect on the model if only this layer has it; effects of layers add up."""


def path_of(layers: Sequence[LayerOptions], limit_bytes: float = math.inf) -> list[Sizes]:
    """Returns ever larger sizes, from the smallest of all layers until nothing more fits `limit_bytes`. Each step
    enlarges the layer whose larger predictor saves most per byte; one that saves nothing comes last."""
    at = [0] * len(layers)
    used = sum(options.nbytes[0] for options in layers)
    path = [tuple(at)]
    while True:
        steps = [
            (_saved_per_byte(options, at[number], larger), -number, -larger)
            for number, options in enumerate(layers)
            for larger in range(at[number] + 1, len(options.nbytes))
            if used + options.nbytes[larger] - options.nbytes[at[number]] <= limit_bytes
        ]
        if not steps:
            return path
        _, number, larger = max(steps)
        number, larger = -number, -larger
        used += layers[number].nbytes[larger] - layers[number].nbytes[at[number]]
        at[number] = larger
        path.append(tuple(at))


def _saved_per_byte(options: LayerOptions, now: int, larger: int) -> float:
    saved, more_bytes = options.effect[now] - options.effect[larger], options.nbytes[larger] - options.nbytes[now]
    return saved / more_bytes if more_bytes > 0 else math.copysign(math.inf, saved)


def first_that_meets(meets: Callable[[int], bool], length: int, start: int) -> int:
    """Returns the first of `length` places that meets the condition, which all later ones then must meet; the last if
    none does. Searches from `start` in doubling steps up or down, then by bisection."""
    meets = functools.cache(meets)
    low, high, step = -1, length - 1, 1
    place = start
    while low + 1 < high:
        if meets(place):
            high = place
            place = max(low + 1, place - step) if low < 0 else (low + high) // 2
        else:
            low = place
            place = min(high - 1, place + step) if high == length - 1 else (low + high) // 2
        step *= 2
    return high


def scaled_effects(smallest: float, errors: Sequence[float]) -> tuple[float, ...]:
    """Estimates a layer's effect at each size: that of the smallest size, in proportion to the output's errors."""
    return tuple(smallest * error / errors[0] if errors[0] else 0.0 for error in errors)
