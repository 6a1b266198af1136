"""Runs Algorithm 1 over what flash is really read for: the activations that the plan's cache misses, instead of all.

Pinned units are never read and cached ones seldom, so their co-activation does not count. It pays where the cache
serves most activations, as at the densities of top-k methods, and is about as good as counting all activations where
few units are active (docs/experiments/order.md).
"""

from coldpress.compiler.stages.order._task import Arranged, Heuristic, OrderTask
from coldpress.compiler.stages.order.ripple import join_links


class Plugin(Heuristic):
    def arrange(self, task: OrderTask) -> Arranged:
        found = join_links(task.demand.missed.counts, task.demand.left_on_flash)
        return Arranged(task.with_pinned_last(found), "misses")
