"""Algorithm 1 (order/ripple.py) over the units that are left on flash; pinned ones lie behind them.

Published, it orders all units. The hottest are then in DRAM and leave holes in the middle of every link.
"""

import numpy as np

from compiler.order._task import Problem
from compiler.order.ripple import join_links


def arrange(problem: Problem) -> np.ndarray:
    """The order on flash, int32 [num_units]; pinned units last, by id."""
    return problem.with_pinned_last(join_links(problem.counts, problem.left_on_flash))
