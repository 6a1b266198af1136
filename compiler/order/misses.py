"""Algorithm 1 over what flash is really read for: the activations that the plan's cache misses, instead of all.

Pinned units are never read and those in the dynamic cache seldom, so their co-activation should count for nothing. It
does not pay: misses are ten times rarer than activations, and the counts of what is left on flash say more about the
misses of other text than the misses of this text do (EXPERIMENTS.md). `auto` does not try it.
"""

import numpy as np

from compiler.order._coactivation import pair_counts
from compiler.order._problem import Problem
from compiler.order.ripple import join_links


def arrange(problem: Problem) -> np.ndarray:
    """The order on flash, int32 [num_units]; pinned units last, by id."""
    counts = pair_counts(problem.reads, problem.num_tokens, problem.threads)
    return problem.with_pinned_last(join_links(counts, problem.left_on_flash))
