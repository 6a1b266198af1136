"""Runs Algorithm 1 by Jaccard similarity over the units left on flash: common tokens over the tokens of either unit.

Plain counts chain hot units to hot units, whatever else they do; normalized counts let cold units of one topic meet.
"""

from coldpress.compiler.stages.order._pair_weights import jaccard
from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task
from coldpress.compiler.stages.order.ripple import join_links


class Plugin(Heuristic):
    """Algorithm 1 by Jaccard similarity."""

    COUNT_SQUARES = 2
    """The weights and the counts."""

    def arrange(self, task: Task) -> Arranged:
        weights = jaccard(task.activity.counts, task.activity.totals)
        return Arranged(task.with_pinned_last(join_links(weights, task.demand.left_on_flash)), "jaccard")
