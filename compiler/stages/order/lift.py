"""Runs Algorithm 1 by lift over the units left on flash: how much more often two units meet than by chance.

Lift favours the rarest pairs, whose few common tokens may be chance; Jaccard lies between it and plain counts.
"""

import math

import numpy as np

from coldpress.compiler.compiled import compiled
from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task
from coldpress.compiler.stages.order.jaccard import HIGHEST
from coldpress.compiler.stages.order.ripple import join_links


class Plugin(Heuristic):
    COUNT_SQUARES = 2
    """The weights and the counts."""

    def arrange(self, task: Task) -> Arranged:
        weights = lift_weights(task.activity.counts, task.activity.totals, task.activity.num_columns)
        return Arranged(task.with_pinned_last(join_links(weights, task.demand.left_on_flash)), "lift")


@compiled
def lift_weights(counts, totals, num_tokens):
    """Returns how much more often than by chance two units meet, P(ij) / (P(i) P(j)), scaled to uint16 [n, n]. A
    logarithm (linear between powers of two, hence the same on any machine) keeps order and fits the range: from 1 for a
    lift of 1 / num_tokens to HIGHEST for num_tokens; 0 for pairs that never meet."""
    weights = np.zeros(counts.shape, np.uint16)
    highest = _logarithm(num_tokens + 1.0)
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            if counts[i, j]:
                above = _logarithm(counts[i, j] * num_tokens / (totals[i] * totals[j])) + highest
                weights[i, j] = 1 + int((HIGHEST - 1) * above / (2 * highest))
    return weights


@compiled
def _logarithm(value):
    mantissa, exponent = math.frexp(value)
    return exponent + 2 * mantissa - 2
