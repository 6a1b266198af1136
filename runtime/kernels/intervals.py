"""Which units to read together, by what they matter and what a device takes to read them; all in flash order.

A read costs something besides its bytes, so the units between two that are wanted may cost less than a second read
(Ripple 5.1). Of all sets of intervals the best one is looked for: the most importance, less a price per second. A
device works on reads and on bytes at once and takes as long as the larger of the two needs
(`coldpress.schemas.device.flash_seconds`), so what a read or a byte costs hangs on which of them is short. For every
mix of the two, costs add up, and a pass of two states over the units finds the best intervals exactly; halving closes
in on the mix at which both take equally long, and what was worth most on the way, under the law itself, is taken. A
third bound is the first byte's time: within it more is read for nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from coldpress.runtime import _native

STEPS = 7
"""Mixes tried: the last is within a hundredth of where both bounds are equal."""
LEAST_PRICE = 1e-260
"""No gain over it is too large for a number of 64 bits."""
LEAST_STEPS = 8
"""Prices tried where less is worth reading than the least time allows."""
FLOAT32_MAX = np.finfo(np.float32).max


class Times(NamedTuple):
    """What reading takes besides units, counted in what the bytes of one unit take."""

    own: float
    """Of a read, however short."""
    edge: float
    """Of the bytes of a read that belong to no unit: pages' ends. Negative where what lies between two units counts as
    theirs, and a read has none behind the last."""
    least: float
    """Of a request, however little it reads: the first byte's."""


def best_intervals(gain: np.ndarray, price: float, times: Times) -> np.ndarray:
    """The units to read, bool [T, num_units].

    A request takes the largest of `reads * own`, `units + reads * edge` and `least`, which it takes in any case: that
    the first byte's time is saved where nothing at all is read is no choice here. Passes are linear in the units.

    Args:
        gain: Importance of each unit, float32 [T, num_units] in flash order, 0 where a unit is in DRAM already: it is
            used whether or not a read brings it, and a read that runs over it pays for its bytes.
        price: Of the time, in the measure of `gain`.
        times: Of reads.

    Raises:
        TypeError: if `gain` has another dtype or is not contiguous.
    """

    def at(gain: np.ndarray, price: float) -> np.ndarray:
        chosen = np.zeros(gain.shape, bool)
        _native.best_intervals(gain, price, times.own, times.edge, STEPS, chosen)
        return chosen

    return _filled(gain, price, times, at)


def reference_best_intervals(gain: np.ndarray, price: float, times: Times) -> np.ndarray:
    """What `best_intervals` computes, in numpy."""
    return _filled(gain, price, times, lambda gain, price: _at_any_time(gain, price, times))


def _filled(gain: np.ndarray, price: float, times: Times, at: Callable[[np.ndarray, float], np.ndarray]) -> np.ndarray:
    """What `at` finds best at a price without a least time, and where it takes less, what that time is best used for.

    All that is read within the least time costs the same, so the price falls until it is used up.
    """
    chosen = at(gain, price)
    chosen[_sums(gain, chosen) < price * (_time(chosen, times) - times.least)] = False  # worth less than nothing
    rows = np.flatnonzero(_time(chosen, times) < times.least)
    if not rows.size or price <= 0:
        return chosen
    part, best = gain[rows], np.full(rows.size, -np.inf)
    low, high = np.zeros(rows.size), np.full(rows.size, float(price))
    for _ in range(LEAST_STEPS):
        middle = np.maximum((low + high) / 2, LEAST_PRICE)
        tried = at(np.minimum(part / middle[:, None], FLOAT32_MAX).astype(np.float32), 1.0)
        time = _time(tried, times)
        worth = _sums(part, tried) - price * np.maximum(times.least, time)
        better = worth > best
        chosen[rows[better]], best = tried[better], np.maximum(worth, best)
        low, high = np.where(time < times.least, low, middle), np.where(time < times.least, middle, high)
    return chosen


def _time(chosen: np.ndarray, times: Times) -> np.ndarray:
    """What reads and bytes take, float64 [T]."""
    reads = np.count_nonzero(chosen[:, 1:] & ~chosen[:, :-1], axis=1) + np.count_nonzero(chosen[:, :1], axis=1)
    return np.maximum(reads * times.own, np.count_nonzero(chosen, axis=1) + reads * times.edge)


def _sums(gain: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Gains of what is chosen, float64 [T]."""
    return (gain * chosen).sum(axis=1, dtype=np.float64)


def _at_any_time(gain: np.ndarray, price: float, times: Times) -> np.ndarray:
    """The native choice: each step for all tokens at once."""
    low, high, best = np.zeros(len(gain)), np.ones(len(gain)), np.full(len(gain), -np.inf)
    chosen = np.zeros(gain.shape, bool)
    for _ in range(STEPS):
        mix = (low + high) / 2
        read_cost = price * ((1 - mix) * times.edge + mix * times.own)
        tried = intervals_at(gain, price * (1 - mix), np.maximum(0.0, read_cost))
        starts = np.count_nonzero(tried[:, 1:] & ~tried[:, :-1], axis=1) + tried[:, 0]
        reads, size = starts * times.own, np.count_nonzero(tried, axis=1) + starts * times.edge
        sums = np.cumsum(np.where(tried, gain, 0), axis=1, dtype=np.float64)[:, -1]  # one after another
        worth = sums - price * np.maximum(reads, size)
        better = worth > best
        chosen[better], best = tried[better], np.maximum(worth, best)
        low, high = np.where(reads > size, mix, low), np.where(reads > size, high, mix)
    return chosen


def intervals_at(gain: np.ndarray, unit_cost: np.ndarray, read_cost: np.ndarray) -> np.ndarray:
    """The intervals with the largest sum of gains less costs, float64 [T] per unit and per read; exactly.

    Between equal sums what reads fewer units wins.
    """
    num_tokens, num_units = gain.shape
    net = np.ascontiguousarray(gain.T, dtype=np.float64) - unit_cost
    reading, idle = np.full(num_tokens, -np.inf), np.zeros(num_tokens)
    started = np.empty((num_units, num_tokens), bool)  # the best way to be reading here begins here
    stopped = np.empty((num_units + 1, num_tokens), bool)  # the best way to be idle before unit i was reading i - 1
    stopped[0] = False
    for unit in range(num_units):
        started[unit] = idle - read_cost >= reading
        reading = np.where(started[unit], idle - read_cost, reading) + net[unit]
        stopped[unit + 1] = reading > idle
        idle = np.where(stopped[unit + 1], reading, idle)
    chosen = np.zeros((num_units, num_tokens), bool)
    on = stopped[num_units].copy()
    for unit in range(num_units - 1, -1, -1):
        chosen[unit] = on
        on = (on & ~started[unit]) | stopped[unit]
    return np.ascontiguousarray(chosen.T)
