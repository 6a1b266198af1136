"""An order for the reads that really happen: local search on the collapsed-read cost of the units left on flash.

Algorithm 1 (order/ripple.py) joins pairs, so it counts a read saved only where two units lie side by side, and it
spends its best places on hot units, which are pinned in DRAM anyway. Here the cost is that of the runtime: two active
units with a gap between them cost the gap's bytes or one more read, whichever is cheaper (access collapse, Ripple 5.1).

Order and gap are chosen together. The device takes the longer of reads / IOPS and bytes / bandwidth; under the best
gap g of an order both are about balanced, and then a byte is worth 1 / g reads, to which comes a page for rounding out
where units are no whole pages. That is the price of a gap in the search (_search.py), which starts from Algorithm 1
over what the plan's cache misses (order/misses.py) and looks at the misses only: at the density of top-k methods that
is worth several times what the search gains on all activations (EXPERIMENTS.md).
"""

import numpy as np

from compiler.order import misses
from compiler.order._coactivation import to_words
from compiler.order._friends import nearest_friends
from compiler.order._local_search import improve
from compiler.order._task import Problem

NUM_FRIENDS = 8


def arrange(problem: Problem) -> np.ndarray:
    """The order on flash, int32 [num_units]; pinned units last, by id."""
    start = misses.arrange(problem)
    return refine(problem.missed, start, gap_cost(problem, problem.judge(start).gap_bytes))


def gap_cost(problem: Problem, gap_bytes: int) -> float:
    """Cost of one unit read for nothing, in reads, where `gap_bytes` is the best gap; at most 1."""
    page_bytes = problem.flash.page_bytes.value
    rounding = page_bytes if problem.unit_bytes % page_bytes else 0
    return min(1.0, problem.unit_bytes / max(1, gap_bytes + rounding))


def refine(problem: Problem, start: np.ndarray, gap_cost: float) -> np.ndarray:
    """A better order than `start`, whose pinned units lie last; int32 [num_units]."""
    units = problem.left_on_flash
    if units.size < 3:
        return start
    friends = nearest_friends(problem.counts, problem.totals, units, min(NUM_FRIENDS, units.size - 1))
    place_of = np.empty(len(problem.bits), np.int64)
    place_of[units] = np.arange(units.size)
    order = place_of[start[: units.size]]
    visits = np.random.default_rng(problem.seed).permutation(units.size)
    improve(to_words(problem.bits[units]), order, friends, gap_cost, visits)
    return problem.with_pinned_last(units[order])
