"""Algorithm 1 by lift over the units left on flash: how much more often than by chance two units are active together.

Lift favours the rarest pairs, whose few common tokens may be chance; it is the other end of what Jaccard is between.
"""

import numpy as np

from compiler.order._pair_weights import lift
from compiler.order._task import Problem
from compiler.order.ripple import join_links


def arrange(problem: Problem) -> np.ndarray:
    """The order on flash, int32 [num_units]; pinned units last, by id."""
    weights = lift(problem.counts, problem.totals, problem.num_tokens)
    return problem.with_pinned_last(join_links(weights, problem.left_on_flash))
