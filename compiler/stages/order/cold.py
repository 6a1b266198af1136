"""Runs Algorithm 1 (order/ripple.py) over the units left on flash; pinned units follow them.

The published algorithm orders all units. The hottest are then in DRAM and leave holes in the middle of every link. In a
group of layers a unit counts as pinned where all layers pin it.
"""

from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task
from coldpress.compiler.stages.order.ripple import join_links


class Plugin(Heuristic):
    def arrange(self, task: Task) -> Arranged:
        return Arranged(task.with_pinned_last(join_links(task.activity.counts, task.demand.left_on_flash)), "cold")
