"""Ripple's Algorithm 1 (4.3): the nearest two links are joined until one path holds all units.

Reads activation bits; the distance of two units is 1 - P(ij) (Eq. 3), so pairs are taken by falling co-activation
count, ties by lower i, then lower j. A pair is skipped when one end is inside a link, or both are in the same one.
Pairs of count 0 count as well: the graph is complete. The path is written from the end with the lower id.

Counts are small integers, so a counting sort replaces the priority queue; and since a unit inside a link never matters
again, pairs are sorted in runs of falling count, each among the units that are still free
(runtime/native/src/coactivation.cpp).
"""

import numpy as np

from coldpress.compiler.stages.order._task import Arranged, Heuristic, OrderTask
from coldpress.runtime import _native

RUN_PAIRS = 1 << 23
"""Pairs sorted at a time: 8 bytes each."""


class Plugin(Heuristic):
    def arrange(self, task: OrderTask) -> Arranged:
        return Arranged(join_links(task.activity.counts), "ripple")


def join_links(counts: np.ndarray, units: np.ndarray | None = None, run_pairs: int = RUN_PAIRS) -> np.ndarray:
    """Runs Algorithm 1 on weights; returns ids by position, int32 [n] or [m].

    Args:
        counts: Co-activation counts or other integer weights, uint16 or uint32 [n, n]; only [i, j] with i < j is read.
        units: Ids of the units to order, ascending int32 [m]; None for all.
        run_pairs: Bounds memory; does not change the result.
    """
    ordered = np.arange(len(counts), dtype=np.int32) if units is None else units
    order = np.empty(ordered.size, np.int32)
    _native.join_links(counts, ordered, run_pairs, order)
    return order
