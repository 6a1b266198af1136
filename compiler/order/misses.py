"""Algorithm 1 over what flash is really read for: the activations that the plan's cache misses, instead of all.

Pinned units are never read and those in the dynamic cache seldom, so their co-activation counts for nothing. It pays
where the cache answers for most activations, as at the densities of top-k methods, and is about as good as counting all
of them where few units are active (EXPERIMENTS.md).
"""

import numpy as np

from compiler.order import cold
from compiler.order._task import Problem


def arrange(problem: Problem) -> np.ndarray:
    """The order on flash, int32 [num_units]; pinned units last, by id."""
    return cold.arrange(problem.missed)
