"""Picks the best order on text it was not made from: heuristics compete on the last calibration tokens.

Each is fitted on the earlier tokens and judged by the modelled flash seconds of the plan's cache misses, under the
collapse gap that suits it best. Algorithm 1 as published (ripple) wins unless another one beats it by MARGIN, so noise
on a thousand tokens is decided in its favour. If it wins it is fitted again on all tokens.

The candidates have each won somewhere (docs/experiments/order.md): ripple, frequency and misses. There is headroom
where DRAM keeps some units and reads are shorter than the gap that costs as much as a read; there is none where a layer
is read within one latency or the bytes that are needed anyway take longest.
"""

import numpy as np

from coldpress.compiler.stages.order import frequency, misses, ripple
from coldpress.compiler.stages.order._task import Arranged, Heuristic, OrderTask

RIPPLE, MISSES, FREQUENCY = ripple.Plugin(), misses.Plugin(), frequency.Plugin()
LEAST_JUDGED_TOKENS = 64
MARGIN = 0.02
"""Share of ripple's seconds that another order must save on the judged tokens: another text may take that much back."""


class Plugin(Heuristic):
    COUNT_SQUARES = 3
    """Counts of the tokens to fit on, of their cache misses, and of all tokens."""

    def arrange(self, task: OrderTask) -> Arranged:
        """Takes ripple's order without a contest where too few tokens are left to judge by, or where no order could
        beat it by MARGIN: a layer that is read within one latency, or whose needed bytes take all the time."""
        if task.demand.num_judged >= LEAST_JUDGED_TOKENS:
            to_beat = (1 - MARGIN) * task.judge(RIPPLE.arrange(task.fitting).order).seconds
            if task.least_seconds < to_beat:
                rivals = _rivals(task)
                seconds = {name: task.judge(order).seconds for name, order in rivals.items()}
                winner = min(seconds, key=lambda name: seconds[name])
                if seconds[winner] <= to_beat:
                    return Arranged(rivals[winner], winner)
        return RIPPLE.arrange(task)


def _rivals(task: OrderTask) -> dict[str, np.ndarray]:
    """Makes the rivals' orders without the judged tokens."""
    fitting = task.fitting
    return {"frequency": FREQUENCY.arrange(fitting).order, "misses": MISSES.arrange(fitting).order}
