"""Which units to read together, by what they matter and what a device takes to read them; all in flash order.

A read costs something besides its bytes, so the units between two that are wanted may cost less than a second read
(Ripple 5.1). Of all sets of intervals the best one is looked for: the most importance, less a price per second. A
device works on reads and on bytes at once and takes as long as the larger of the two needs
(`schemas.device.flash_seconds`), so what a read or a byte costs hangs on which of them is short. For every mix of the
two, costs add up, and a pass of two states over the units finds the best intervals exactly; halving closes in on the
mix at which both take equally long, and what was worth most on the way, under the law itself, is taken.
"""

import numpy as np

from runtime import _native

STEPS = 7
"""Mixes tried: the last is within a hundredth of where both bounds are equal."""


def best_intervals(gain: np.ndarray, price: float, read_units: float, edge_units: float) -> np.ndarray:
    """The units to read, bool [T, num_units].

    Time is counted in what the bytes of one unit take: `reads * read_units`, or `units + reads * edge_units`, whichever
    is larger. Passes are linear in the units.

    Args:
        gain: Importance of each unit, float32 [T, num_units] in flash order, 0 where a unit is in DRAM already: it is
            used whether or not a read brings it, and a read that runs over it pays for its bytes.
        price: Of the time, in the measure of `gain`.
        read_units: Time of a read, however short.
        edge_units: Time of the bytes of a read that belong to no unit: pages' ends. Negative where what lies between
            two units counts as theirs, and a read has none behind the last.

    Raises:
        TypeError: if `gain` has another dtype or is not contiguous.
    """
    chosen = np.zeros(gain.shape, bool)
    _native.best_intervals(gain, price, read_units, edge_units, STEPS, chosen)
    return chosen


def reference_best_intervals(gain: np.ndarray, price: float, read_units: float, edge_units: float) -> np.ndarray:
    """What `best_intervals` computes, in numpy: each step for all tokens at once."""
    low, high, best = np.zeros(len(gain)), np.ones(len(gain)), np.full(len(gain), -np.inf)
    chosen = np.zeros(gain.shape, bool)
    for _ in range(STEPS):
        mix = (low + high) / 2
        read_cost = price * ((1 - mix) * edge_units + mix * read_units)
        tried = intervals_at(gain, price * (1 - mix), np.maximum(0.0, read_cost))
        sums = np.cumsum(np.where(tried, gain, 0), axis=1, dtype=np.float64)[:, -1]  # one after another
        starts = np.count_nonzero(tried[:, 1:] & ~tried[:, :-1], axis=1) + tried[:, 0]
        reads, size = starts * read_units, np.count_nonzero(tried, axis=1) + starts * edge_units
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
