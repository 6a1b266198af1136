"""What all cache policies share: which units are in, how many may be, and the protection of the current request.

A policy sees unit ids and returns unit ids. A request is one `touch` with all ids that are wanted, ascending, and then
at most one `admit` with those that were missing. No unit of the current request is ever evicted: its rows may be in
use, and evicting what this very token needs for something else that it needs can only lose. What does not fit is
refused.
"""

import numpy as np


class Policy:
    """The cache of one family of one layer; subclasses say which units to give up and which to let in."""

    admits = True
    """False where nothing ever comes in beside the pinned units, so that slots for it would be wasted."""

    def __init__(self, num_units: int, capacity: int, pinned: np.ndarray) -> None:
        """An empty cache.

        Args:
            num_units: Units of the family in the layer; ids are below it.
            capacity: Units that may be cached beside the pinned ones.
            pinned: Ids that are always in, integers.
        """
        self.capacity = capacity
        self.num_cached = 0
        self._pinned = np.zeros(num_units, bool)
        self._pinned[pinned] = True
        self._cached = np.zeros(num_units, bool)
        self._last_request = np.zeros(num_units, np.int64)
        self._request = 0

    @property
    def present(self) -> np.ndarray:
        """bool [num_units]: pinned or cached."""
        return self._pinned | self._cached

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """bool [k]: which of `ids` are pinned or cached."""
        return self._pinned[ids] | self._cached[ids]

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Begins a request for `ids` (distinct, ascending) and says which of them are in, bool [k]."""
        self._request += 1
        self._last_request[ids] = self._request
        return self.contains(ids)

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lets in what it sees fit of `ids`, the missing units of the current request.

        Returns:
            The admitted ids, and the ids evicted for them: equally many or fewer, none of them of the current request.
        """
        candidates = self._wanted(ids)
        num_free = self.capacity - self.num_cached
        evicted = self._victims(candidates[num_free:]) if candidates.size > num_free else ids[:0]
        admitted = candidates[: num_free + evicted.size]
        self._cached[evicted] = False
        self._cached[admitted] = True
        self.num_cached += admitted.size - evicted.size
        return admitted, evicted

    def drop(self, ids: np.ndarray) -> None:
        """Forgets cached units, such as admitted ones whose read failed."""
        self._cached[ids] = False
        self.num_cached -= ids.size

    def reset(self) -> None:
        """Begins a new context (another prompt); cached units stay."""

    def _wanted(self, ids: np.ndarray) -> np.ndarray:
        """The candidates for admission, in the order in which they get the room there is."""
        return ids

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        """The units to give up for the first of `candidates`, in the order in which they go; at most as many."""
        raise NotImplementedError

    def _evictable(self) -> np.ndarray:
        """Ids that are cached and not part of the current request, ascending."""
        return np.flatnonzero(self._cached & (self._last_request < self._request))


def smallest(keys: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` smallest of `keys` (distinct integers), smallest first; fewer where there are fewer."""
    count = min(count, keys.size)
    if count < keys.size:
        chosen = np.argpartition(keys, count)[:count]
        return chosen[np.argsort(keys[chosen])]
    return np.argsort(keys)
