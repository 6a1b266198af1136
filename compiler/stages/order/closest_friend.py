"""Puts each unit next to its closest friend (LLM in a flash, 3.2 and D): an ablation.

The paper stores every unit with the unit it is active with most, and finds that very active units are the friends of
almost all others and are loaded again and again. On flash without copies the same shows as bundles of one: the friend
is already placed. Bundles follow each other by id. benchmarks/order.py also measures the paper's way, with copies.
"""

import numpy as np

from coldpress.compiler.stages.order._task import Arranged, Heuristic, OrderTask


class Plugin(Heuristic):
    def arrange(self, task: OrderTask) -> Arranged:
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
    """Returns the unit that each unit is active with most, int64 [n]: the lowest id on ties, itself if there is none.
    Of `counts` [n, n] only [i, j] with i < j is read."""
    both = np.triu(counts, 1)
    both += both.T
    return np.where(both.any(axis=1), both.argmax(axis=1), np.arange(len(both)))
