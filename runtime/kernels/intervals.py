"""Chooses which units to read together, by their importance and by a device's reading time; all in flash order.

A read costs time besides its bytes, so reading the units between two wanted ones may cost less than a second read
(Ripple 5.1). The search maximizes importance less a price per second over all sets of intervals. A device handles
operations and bytes at the same time as far as they overlap (`coldpress.schemas.device.flash_seconds`): where wholly,
the slower of the two counts, and where not at all, their sum, so the cost of one more read or byte depends on the
balance of both. A norm of two sums is hard to optimize, but it is the largest of all weighted mixes of them whose
weights have the dual norm 1, a mix adds up unit by unit, and a dynamic program with two states (reading or not) finds
the best intervals for a mix exactly. Bisection approaches the mix that the intervals found have themselves; among all
intervals tried, the ones that are best under the device's real law win. A third bound is the time to the first byte:
where it overlaps, further reads within it are free.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from coldpress.runtime import _native
from coldpress.schemas.law import combined

STEPS = 7
"""Mixes tried: the last is within a hundredth of the mix at which both bounds are equal."""
LEAST_PRICE = 1e-260
"""Least price to divide by: a float32 gain over it still fits float64."""
LEAST_STEPS = 8
"""Lower prices tried if the intervals worth their price take less than the least time."""
FLOAT32_MAX = np.finfo(np.float32).max


class Times(NamedTuple):
    """The times of reading besides the units themselves; the time of one unit's bytes is 1."""

    own: float
    """Time of one read operation, however short."""
    edge: float
    """Time of a read's bytes outside its units: the ends of pages. Negative if the bytes between two units count as
    part of them, because a read has none after its last unit."""
    least: float
    """Time to the first byte of a request, however little it reads."""
    overlap: float = 1.0
    """The extent to which the three pass at the same time: with 1 the largest counts, with 0 their sum."""


def best_intervals(gain: np.ndarray, price: float, times: Times) -> np.ndarray:
    """Chooses the units to read, bool [T, num_units].

    A request takes `reads * own`, `units + reads * edge` and `least`, as far as they overlap. The search always counts
    `least`: it does not consider saving the first byte's time by reading nothing. Its passes are linear in the units.

    Args:
        gain: Importance of each unit, float32 [T, num_units] in flash order; 0 for a unit in DRAM, which is used
            without a read, although a read that runs over it pays for its bytes.
        price: Price of the time of one unit's bytes, in the measure of `gain`.
        times: The device's times.

    Raises:
        TypeError: if `gain` has another dtype or is not contiguous.
    """

    def at(gain: np.ndarray, price: float) -> np.ndarray:
        chosen = np.zeros(gain.shape, bool)
        _native.best_intervals(gain, price, times.own, times.edge, times.overlap, STEPS, chosen)
        return chosen

    return filled(gain, price, times, at)


def filled(gain: np.ndarray, price: float, times: Times, at: Callable[[np.ndarray, float], np.ndarray]) -> np.ndarray:
    """Returns the intervals that `at` finds at a price; where they take less than the least time, fills that time best.

    Within the least time more reading costs little or nothing, as `times.overlap` says, so bisection looks for the
    lower price that the intervals found have by the law. `at` itself knows no least time.
    """
    chosen = at(gain, price)
    time, total = _times(chosen, times)
    chosen[_sums(gain, chosen) < price * (total - times.least)] = False  # not worth their price
    rows = np.flatnonzero(time < times.least)
    if not rows.size or price <= 0 or times.overlap == 0:
        return chosen
    part, best = gain[rows], np.full(rows.size, -np.inf)
    low, high = np.zeros(rows.size), np.full(rows.size, float(price))
    for _ in range(LEAST_STEPS):
        middle = np.maximum((low + high) / 2, LEAST_PRICE)
        # `at` takes one price for all tokens, so each token's own price divides its gains instead
        tried = at(np.minimum(part / middle[:, None], FLOAT32_MAX).astype(np.float32), 1.0)
        time, total = _times(tried, times)
        worth = _sums(part, tried) - price * total
        better = worth > best
        chosen[rows[better]], best = tried[better], np.maximum(worth, best)
        too_low = middle < price * _slope(time, total, times.overlap)
        low, high = np.where(too_low, middle, low), np.where(too_low, high, middle)
    return chosen


def _slope(time: np.ndarray, total: np.ndarray, overlap: float) -> np.ndarray:
    """Returns the time that a request takes more for each second of reading and bytes more, float64 [T]."""
    if overlap == 1:
        return (time >= total).astype(np.float64)
    return (time / np.maximum(total, LEAST_PRICE)) ** (overlap / (1 - overlap))


def _times(chosen: np.ndarray, times: Times) -> tuple[np.ndarray, np.ndarray]:
    """Returns the time of operations and bytes, and that of a request, with `least`, float64 [T] each."""
    reads = np.count_nonzero(chosen[:, 1:] & ~chosen[:, :-1], axis=1) + np.count_nonzero(chosen[:, :1], axis=1)
    operations, size = reads * times.own, np.maximum(0.0, np.count_nonzero(chosen, axis=1) + reads * times.edge)
    return combined((operations, size, 0.0), times.overlap), combined((operations, size, times.least), times.overlap)


def _sums(gain: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return (gain * chosen).sum(axis=1, dtype=np.float64)
