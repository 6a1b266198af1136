"""Ripple's Algorithm 1 (4.3): the nearest two links are joined until one path holds all units.

Reads activation bits; the distance of two units is 1 - P(ij) (Eq. 3), so pairs are taken by falling co-activation
count, ties by lower i, then lower j. A pair is skipped when one end is inside a link, or both are in the same one.
Pairs of count 0 count as well: the graph is complete. The path is written from the end with the lower id.

Counts are small integers, so a counting sort replaces the priority queue; and since a unit inside a link never matters
again, pairs are sorted in runs of falling count, each among the units that are still free.
"""

import numpy as np

from coldpress.compiler.compiled import compiled
from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task

RUN_PAIRS = 1 << 23
"""Pairs sorted at a time: 8 bytes each."""


class Plugin(Heuristic):
    def arrange(self, task: Task) -> Arranged:
        return Arranged(join_links(task.activity.counts), "ripple")


def join_links(counts: np.ndarray, units: np.ndarray | None = None, run_pairs: int = RUN_PAIRS) -> np.ndarray:
    """Runs Algorithm 1 on weights; returns ids by position, int32 [n] or [m].

    Args:
        counts: Co-activation counts or other integer weights, unsigned [n, n]; only [i, j] with i < j is read.
        units: Ids of the units to order, ascending [m]; None for all.
        run_pairs: Bounds memory; does not change the result.
    """
    num_units = len(counts)
    neighbours = np.full((num_units, 2), -1, np.int32)
    if units is not None:
        neighbours[:, 1] = num_units  # marks them as inside a link, so that they are never joined
        neighbours[units, 1] = -1
    parents = np.arange(num_units, dtype=np.int32)
    highest = int(counts.max(initial=0))
    while highest >= 0:
        free = np.flatnonzero(neighbours[:, 1] < 0).astype(np.int32)
        if free.size == 2 and neighbours[free, 0].min(initial=0) >= 0:
            break  # one path: only its two ends are free
        tally = _tally(counts, free, parents, highest)
        lowest = _run_end(tally, highest, run_pairs)
        if tally[lowest : highest + 1].sum() > run_pairs:  # a single count: its pairs come in sorted order already
            _join_equal(counts, free, highest, neighbours, parents)
        else:
            first, second = _sorted_pairs(counts, free, parents, tally, lowest, highest)
            _join(first, second, neighbours, parents)
        highest = lowest - 1
    return _walk(neighbours, num_units if units is None else len(units))


def _run_end(tally: np.ndarray, highest: int, run_pairs: int) -> int:
    """Returns the lowest count such that all pairs from it to `highest` fit in a run; at least `highest` itself."""
    pairs_from_top = np.cumsum(tally[highest::-1])
    return highest - max(0, int(np.searchsorted(pairs_from_top, run_pairs, side="right")) - 1)


@compiled
def _root(parents, unit):
    while parents[unit] != unit:
        parents[unit] = parents[parents[unit]]
        unit = parents[unit]
    return unit


@compiled
def _tally(counts, free, parents, highest):
    """Counts pairs of free units of different links by count, int64 [highest + 1]."""
    tally = np.zeros(highest + 1, np.int64)
    for x in range(free.size):
        i = free[x]
        root = _root(parents, i)
        for y in range(x + 1, free.size):
            count = counts[i, free[y]]
            if count <= highest and _root(parents, free[y]) != root:
                tally[count] += 1
    return tally


@compiled
def _sorted_pairs(counts, free, parents, tally, lowest, highest):
    """Sorts the tallied pairs from `highest` to `lowest`: by falling count, then i, then j (a stable counting sort)."""
    places = np.zeros(highest - lowest + 1, np.int64)
    total = 0
    for count in range(highest, lowest - 1, -1):
        places[count - lowest] = total
        total += tally[count]
    first, second = np.empty(total, np.int32), np.empty(total, np.int32)
    for x in range(free.size):
        i = free[x]
        root = _root(parents, i)
        for y in range(x + 1, free.size):
            count = counts[i, free[y]]
            if lowest <= count <= highest and _root(parents, free[y]) != root:
                place = places[count - lowest]
                places[count - lowest] = place + 1
                first[place], second[place] = i, free[y]
    return first, second


@compiled
def _link(i, j, neighbours, parents):
    if neighbours[i, 1] >= 0 or neighbours[j, 1] >= 0:
        return
    root_i, root_j = _root(parents, i), _root(parents, j)
    if root_i != root_j:
        parents[root_j] = root_i
        neighbours[i, 0 if neighbours[i, 0] < 0 else 1] = j
        neighbours[j, 0 if neighbours[j, 0] < 0 else 1] = i


@compiled
def _join(first, second, neighbours, parents):
    for k in range(first.size):
        _link(first[k], second[k], neighbours, parents)


@compiled
def _join_equal(counts, free, count, neighbours, parents):
    for x in range(free.size):
        i = free[x]
        for y in range(x + 1, free.size):
            if neighbours[i, 1] >= 0:
                break
            if counts[i, free[y]] == count:
                _link(i, free[y], neighbours, parents)


@compiled
def _walk(neighbours, num_units):
    """Returns unit ids along the path, from its end with the lower id."""
    order = np.empty(num_units, np.int32)
    current = 0
    while num_units and neighbours[current, 1] >= 0:
        current += 1
    before = -1
    for position in range(num_units):
        order[position] = current
        following = neighbours[current, 0] if neighbours[current, 0] != before else neighbours[current, 1]
        before, current = current, following
    return order
