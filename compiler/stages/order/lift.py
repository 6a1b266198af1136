"""Runs Algorithm 1 by lift over the units left on flash: how much more often two units meet than by chance.

Lift favours the rarest pairs, whose few common tokens may be chance; Jaccard lies between it and plain counts.
"""

from coldpress.compiler.stages.order._pair_weights import lift
from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task
from coldpress.compiler.stages.order.ripple import join_links


class Plugin(Heuristic):
    """Algorithm 1 by lift."""

    COUNT_SQUARES = 2
    """The weights and the counts."""

    def arrange(self, task: Task) -> Arranged:
        weights = lift(task.activity.counts, task.activity.totals, task.activity.num_columns)
        return Arranged(task.with_pinned_last(join_links(weights, task.demand.left_on_flash)), "lift")
