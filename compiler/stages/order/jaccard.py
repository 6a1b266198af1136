"""Runs Algorithm 1 by Jaccard similarity over the units left on flash: common tokens over the tokens of either unit.

Plain counts chain hot units to hot units, whatever else they do; normalized counts let cold units of one topic meet.
"""

import numpy as np

from coldpress.compiler.compiled import compiled
from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task
from coldpress.compiler.stages.order.ripple import join_links

HIGHEST = 65535
"""The largest pair weight: weights are integers, so that Algorithm 1 can use counting sort."""


class Plugin(Heuristic):
    COUNT_SQUARES = 2
    """The weights and the counts."""

    def arrange(self, task: Task) -> Arranged:
        weights = jaccard_weights(task.activity.counts, task.activity.totals)
        return Arranged(task.with_pinned_last(join_links(weights, task.demand.left_on_flash)), "jaccard")


@compiled
def jaccard_weights(counts, totals):
    """Returns tokens with both units over tokens with either, times HIGHEST; uint16 [n, n], defined for i < j."""
    weights = np.zeros(counts.shape, np.uint16)
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            both = np.int64(counts[i, j])
            weights[i, j] = HIGHEST * both // max(1, totals[i] + totals[j] - both)
    return weights
