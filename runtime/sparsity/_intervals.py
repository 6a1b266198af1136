"""Which units to read together: choices that know where units lie on flash. Pure functions of arrays, in flash order.

A read costs what its bytes cost and something for itself, so the units between two that are wanted may cost less than a
second read (Ripple 5.1). `with_gaps` computes with all that such a read brings; `best_intervals` chooses the intervals
in the first place: of all sets of intervals the one whose importance, less what reading them costs, is the largest.
"""

import numpy as np


def with_gaps(wanted: np.ndarray, gap_units: int) -> np.ndarray:
    """Every unit that is read where reads with at most `gap_units` between them become one.

    Args:
        wanted: bool [T, num_units] in flash order: what each token has to read.
        gap_units: Units between two wanted ones that are read along.
    """
    num_units = wanted.shape[1]
    places = np.arange(num_units)
    before = np.maximum.accumulate(np.where(wanted, places, -1), axis=1)
    after = np.minimum.accumulate(np.where(wanted, places, num_units)[:, ::-1], axis=1)[:, ::-1]
    return (before >= 0) & (after < num_units) & (after - before - 1 <= gap_units)  # of a wanted unit it is -1


def best_intervals(gain: np.ndarray, unit_cost: float, read_cost: float) -> np.ndarray:
    """The units to read: intervals with the largest sum of gains less costs, exactly; bool [T, num_units].

    A pass of two states per token, reading or not: going on costs `unit_cost`, starting `read_cost` more. Steps are
    linear in the units, each for all tokens at once. Between equal sums what reads fewer units wins.

    Args:
        gain: Importance of each unit, float [T, num_units] in flash order, 0 where a unit is in DRAM already: it is
            used whether or not a read brings it, and a read that runs over it pays for its bytes.
        unit_cost: What reading one unit costs, in the measure of `gain`.
        read_cost: What a read costs besides.
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


def num_reads(read: np.ndarray) -> np.ndarray:
    """How many intervals each token reads, int64 [T], of bool [T, num_units] in flash order."""
    return read[:, 0].astype(np.int64) + np.count_nonzero(read[:, 1:] & ~read[:, :-1], axis=1)
