"""An order for the reads that really happen: local search on the collapsed-read cost of the units left on flash.

Algorithm 1 (order/ripple.py) joins pairs, so it counts a read saved only where two units lie side by side, and it
spends its best places on hot units, which are pinned in DRAM anyway. Here the cost is that of the runtime: two active
units with a gap between them cost the gap's bytes or one more read, whichever is cheaper (access collapse, Ripple 5.1).

Order and gap are chosen together. The device takes the longer of reads / IOPS and bytes / bandwidth; under the best
gap g of an order both are about balanced, and then a byte is worth 1 / g reads, plus a page for rounding out where
units are no whole pages. The search (_local_search.py) prices a gap so, and starts from Algorithm 1 over what
the plan's cache misses (order/misses.py) and looks at the misses only: at the density of top-k methods that is worth
several times what the search gains on all activations (EXPERIMENTS.md).
"""

import numpy as np

from coldpress.compiler.stages.order import misses
from coldpress.compiler.stages.order._coactivation import to_words
from coldpress.compiler.stages.order._friends import nearest_friends
from coldpress.compiler.stages.order._local_search import improve
from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task

NUM_FRIENDS = 8


class Plugin(Heuristic):
    """Local search on the cost of collapsed reads."""

    COUNT_SQUARES = 1

    def arrange(self, task: Task) -> Arranged:
        """The order on flash; pinned units last, by id."""
        start = misses.Plugin().arrange(task).order
        return Arranged(refine(task, start, gap_cost(task, task.judge(start).gap_bytes)), "collapse")


def gap_cost(task: Task, gap_bytes: int) -> float:
    """Cost of one unit read for nothing, as a share of what two neighbours save, where `gap_bytes` is the best gap.

    At most 1. Neighbours save a whole read, but for the parts of other layers that lie between them in a group.
    """
    page_bytes = task.flash.page_bytes.value
    rounding = page_bytes if task.unit_bytes % page_bytes else 0
    between = task.stride_bytes - task.unit_bytes
    return min(1.0, task.stride_bytes / max(1, gap_bytes + rounding - between))


def refine(task: Task, start: np.ndarray, gap_cost: float) -> np.ndarray:
    """A better order than `start`, whose pinned units lie last, for what the cache misses; int32 [num_units]."""
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
