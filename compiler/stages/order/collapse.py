"""Orders units for the reads that really happen: local search on the collapsed-read cost of the units left on flash.

Algorithm 1 (order/ripple.py) joins pairs, so it counts a read as saved only where two units lie side by side, and it
spends its best places on hot units, which are pinned in DRAM anyway. This search uses the runtime's cost: two active
units with a gap between them cost the gap's bytes or one more read, whichever is cheaper (access collapse, Ripple 5.1).

Order and gap are chosen together. Where a device's reads and bytes add up, a byte is worth 1 / g reads with the
break-even gap g; where they overlap, the best gap g of an order about balances both, and a byte is worth as much. A
page of rounding comes on top where units are not whole pages. The search (_local_search.py) prices a gap accordingly.
It starts from Algorithm 1 over the plan's cache misses (order/misses.py) and looks only at misses: at the density of
top-k methods that is worth several times what the search gains on all activations (docs/experiments/order.md).
"""

import numpy as np

from coldpress.compiler.compiled import compiled
from coldpress.compiler.stages.order import misses
from coldpress.compiler.stages.order._coactivation import to_words
from coldpress.compiler.stages.order._local_search import improve
from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task

NUM_FRIENDS = 8


class Plugin(Heuristic):
    """Local search on the cost of collapsed reads."""

    COUNT_SQUARES = 1

    def arrange(self, task: Task) -> Arranged:
        start = misses.Plugin().arrange(task).order
        return Arranged(refine(task, start, gap_cost(task, task.judge(start).gap_bytes)), "collapse")


def gap_cost(task: Task, gap_bytes: int) -> float:
    """Returns the cost of reading one unused unit, as a share of what two neighbours save, at most 1; `gap_bytes`: the
    best gap. Neighbours save a whole read, less the parts of other layers that lie between them in a group."""
    page_bytes = task.flash.page_bytes.value
    rounding = page_bytes if task.unit_bytes % page_bytes else 0
    between = task.stride_bytes - task.unit_bytes
    return min(1.0, task.stride_bytes / max(1, gap_bytes + rounding - between))


def refine(task: Task, start: np.ndarray, gap_cost: float) -> np.ndarray:
    """Improves `start`, whose pinned units lie last, for the units that the cache misses; int32 [num_units]."""
    units, missed = task.demand.left_on_flash, task.demand.missed
    if units.size < 3:
        return start
    friends = nearest_friends(missed.counts, missed.totals, units, min(NUM_FRIENDS, units.size - 1))
    place_of = np.empty(task.num_units, np.int64)
    place_of[units] = np.arange(units.size)
    order = place_of[start[: units.size]]
    visits = np.random.default_rng(task.seed).permutation(units.size)
    improve(to_words(missed.bits[units]), order, friends, gap_cost, visits)
    return task.with_pinned_last(units[order])


def nearest_friends(counts: np.ndarray, totals: np.ndarray, units: np.ndarray, num_friends: int) -> np.ndarray:
    """Returns for each of `units` its most similar ones (Jaccard), int32 [m, num_friends], nearest first.

    Friends are indices into `units`; -1 where there are no more. Ties keep roughly the order of ids: the result is
    deterministic, and either friend would do.

    Args:
        counts: Co-activation counts [n, n]; only [i, j] with i < j is read.
        totals: Activations of each unit, int64 [n].
        units: Ids, ascending.
        num_friends: At least 1.
    """
    friends = np.full((units.size, num_friends), -1, np.int32)
    likeness = np.zeros((units.size, num_friends), np.float32)
    _find(counts, totals, units, friends, likeness)
    return friends


@compiled
def _find(counts, totals, units, friends, likeness):
    last = friends.shape[1] - 1
    for x in range(units.size):
        i = units[x]
        for y in range(x + 1, units.size):
            j = units[y]
            both = np.float32(counts[i, j])
            either = np.float32(totals[i] + totals[j]) - both
            if both > likeness[x, last] * either:
                _insert(friends[x], likeness[x], y, both / either)
            if both > likeness[y, last] * either:
                _insert(friends[y], likeness[y], x, both / either)


@compiled
def _insert(friends, likeness, unit, value):
    place = friends.size - 1
    while place > 0 and likeness[place - 1] < value:
        friends[place], likeness[place] = friends[place - 1], likeness[place - 1]
        place -= 1
    friends[place], likeness[place] = unit, value
