"""Finds the units that share most tokens with a unit: candidates for neighbours on flash."""

import numpy as np

from coldpress.compiler.compiled import compiled


def nearest_friends(counts: np.ndarray, totals: np.ndarray, units: np.ndarray, num_friends: int) -> np.ndarray:
    """Returns for each of `units` its most similar ones (Jaccard), int32 [m, num_friends], nearest first.

    Friends are indices into `units`; -1 where there are no more. Ties keep roughly the order of ids: the result is
    deterministic, and either friend would do.

    Args:
        counts: Co-activation counts [n, n]; only [i, j] with i < j is read.
        totals: Activations of each unit, int64 [n].
        units: Ids, ascending.
        num_friends: At least 1.
    """
    friends = np.full((units.size, num_friends), -1, np.int32)
    likeness = np.zeros((units.size, num_friends), np.float32)
    _find(counts, totals, units, friends, likeness)
    return friends


@compiled
def _find(counts, totals, units, friends, likeness):
    last = friends.shape[1] - 1
    for x in range(units.size):
        i = units[x]
        for y in range(x + 1, units.size):
            j = units[y]
            both = np.float32(counts[i, j])
            either = np.float32(totals[i] + totals[j]) - both
            if both > likeness[x, last] * either:
                _insert(friends[x], likeness[x], y, both / either)
            if both > likeness[y, last] * either:
                _insert(friends[y], likeness[y], x, both / either)


@compiled
def _insert(friends, likeness, unit, value):
    place = friends.size - 1
    while place > 0 and likeness[place - 1] < value:
        friends[place], likeness[place] = friends[place - 1], likeness[place - 1]
        place -= 1
    friends[place], likeness[place] = unit, value
