"""Algorithm 1 by Jaccard likeness over the units left on flash: two units' common tokens over the tokens of either.

Plain counts chain hot units with hot units, whatever else they do; normalised ones let cold units of one topic meet.
"""

import numpy as np

from compiler.order._pair_weights import jaccard
from compiler.order._task import Problem
from compiler.order.ripple import join_links


def arrange(problem: Problem) -> np.ndarray:
    """The order on flash, int32 [num_units]; pinned units last, by id."""
    return problem.with_pinned_last(join_links(jaccard(problem.counts, problem.totals), problem.left_on_flash))
