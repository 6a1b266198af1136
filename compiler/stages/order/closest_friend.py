"""Closest-friend bundling (LLM in a flash, 3.2 and D), an ablation: each unit next to the one it is active with most.

The paper stores every unit with its closest friend and finds that very active units are the friends of almost all
others, so that they are loaded again and again. On flash without copies the same shows as bundles of one: the friend is
taken already. Bundles follow each other by id. benchmarks/order.py also counts the paper's own way, with copies.
"""

import numpy as np

from coldpress.compiler.compiled import compiled
from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task


class Plugin(Heuristic):
    """Pairs of closest friends."""

    COUNT_SQUARES = 1

    def arrange(self, task: Task) -> Arranged:
        """The order on flash of all units, pinned or not."""
        friends = closest_friends(task.activity.counts)
        order: list[int] = []
        placed = np.zeros(friends.size, bool)
        for unit, friend in enumerate(friends.tolist()):
            for member in (unit, friend):
                if not placed[member]:
                    placed[member] = True
                    order.append(member)
        return Arranged(np.array(order, np.int32), "closest_friend")


def closest_friends(counts: np.ndarray) -> np.ndarray:
    """The unit each unit is active with most, the lowest id of several, int64 [n]; the unit itself where it has none.

    Args:
        counts: Co-activation counts [n, n]; only [i, j] with i < j is read.
    """
    friends, most = np.arange(len(counts)), np.zeros(len(counts), np.int64)
    _find(counts, friends, most)
    return friends


@compiled
def _find(counts, friends, most):
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            count = np.int64(counts[i, j])
            if count > most[i]:
                most[i], friends[i] = count, j
            if count > most[j]:
                most[j], friends[j] = count, i
