"""Puts each unit next to its closest friend (LLM in a flash, 3.2 and D): an ablation.

The paper stores every unit with the unit it is active with most, and finds that very active units are the friends of
almost all others and are loaded again and again. On flash without copies the same shows as bundles of one: the friend
is already placed. Bundles follow each other by id. benchmarks/order.py also measures the paper's way, with copies.
"""

import numpy as np

from coldpress.compiler.compiled import compiled
from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task


class Plugin(Heuristic):
    def arrange(self, task: Task) -> Arranged:
        friends = closest_friends(task.activity.counts)
        order: list[int] = []
        placed = np.zeros(friends.size, bool)
        for unit, friend in enumerate(friends.tolist()):
            for member in (unit, friend):
                if not placed[member]:
                    placed[member] = True
                    order.append(member)
        return Arranged(np.array(order, np.int32), "closest_friend")


@compiled
def closest_friends(counts):
    """Returns the unit that each unit is active with most, int64 [n]: the lowest id on ties, itself if there is none.
    Of `counts` [n, n] only [i, j] with i < j is read."""
    friends, most = np.arange(len(counts)), np.zeros(len(counts), np.int64)
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            count = np.int64(counts[i, j])
            if count > most[i]:
                most[i], friends[i] = count, j
            if count > most[j]:
                most[j], friends[j] = count, i
    return friends
