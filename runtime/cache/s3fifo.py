"""S3-FIFO: a small queue that lets units pass which are wanted once, a main queue for those wanted again.

Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), Algorithm 1: a missing unit enters the small
queue, or the main one if it left the small one lately. The small queue has `small_share` of the room; a unit at its
end that was wanted twice since it came moves on to the main queue, others go and are remembered, as many as the main
queue holds. A unit at the end of the main queue that was wanted since it came begins anew with one use less. Units of
one request are in the order of their ids, and those of the current one are passed over.
"""

import numpy as np
from pydantic import Field

from runtime.cache._policy import Known, Policy, smallest
from schemas.base import Record

MOST_USES = 3
MOVES_ON = 2
"""Uses in the small queue with which a unit moves on to the main one."""
NOWHERE, SMALL, MAIN = 0, 1, 2


class Options(Record):
    """The small queue."""

    small_share: float = Field(default=0.1, gt=0, lt=1, description="share of the slots that the small queue has")


class Cache(Policy):
    """Ids in, ids out; see `Policy`."""

    def __init__(self, known: Known, options: Options) -> None:
        """See `Policy`."""
        super().__init__(known, options)
        num_units = known.num_units
        self._small_share = options.small_share
        self._share(known.capacity)
        self._queue = np.full(num_units, NOWHERE, np.int8)
        self._entered = np.zeros(num_units, np.int64)
        """When each unit entered its queue."""
        self._uses = np.zeros(num_units, np.int8)
        self._left = np.full(num_units, -1, np.int64)
        """How many units had left the small queue for good when each of them did; -1 for none."""
        self._num_entered = self._num_left = 0

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Counts the uses of what is cached; see `Policy`."""
        cached = ids[self._cached[ids]]
        self._uses[cached] = np.minimum(self._uses[cached] + 1, MOST_USES)
        return super().touch(ids)

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Policy`."""
        admitted, evicted = super().admit(ids)
        known = (self._left[admitted] >= 0) & (self._left[admitted] >= self._num_left - self._num_remembered)
        self._left[admitted] = -1
        self._uses[admitted] = 0
        self._enter(admitted[~known], SMALL)
        self._enter(admitted[known], MAIN)
        return admitted, evicted

    def drop(self, ids: np.ndarray) -> None:
        """See `Policy`."""
        super().drop(ids)
        self._queue[ids] = NOWHERE

    def resize(self, capacity: int, pinned: np.ndarray) -> None:
        """See `Policy`."""
        self._share(capacity)
        super().resize(capacity, pinned)

    def _share(self, capacity: int) -> None:
        """Divides the room between the queues."""
        self._room = max(1, round(self._small_share * capacity))
        self._num_remembered = capacity - self._room

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        found: list[np.ndarray] = []
        missing = candidates.size
        while missing and (old := self._evictable()).size:
            small = old[self._queue[old] == SMALL]
            beyond = int(np.count_nonzero(self._queue == SMALL)) - self._room
            of_main = old[self._queue[old] == MAIN]
            if small.size and (beyond > 0 or not of_main.size):
                gone = self._pass_small(small, min(missing, beyond) if of_main.size else missing)
            else:
                gone = self._pass_main(of_main, missing)
            found.append(gone)
            missing -= gone.size
        return np.concatenate(found) if found else candidates[:0]

    def _pass_small(self, units: np.ndarray, count: int) -> np.ndarray:
        """Of the first `count` units of the small queue, those that go; the others move on."""
        first = self._first(units, count)
        stays = self._uses[first] >= MOVES_ON
        gone = first[~stays]
        self._uses[first[stays]] = 0
        self._enter(first[stays], MAIN)
        self._left[gone] = self._num_left + np.arange(gone.size)
        self._num_left += gone.size
        return self._leave(gone)

    def _pass_main(self, units: np.ndarray, count: int) -> np.ndarray:
        """Of the first `count` units of the main queue, those that go; the others begin anew."""
        first = self._first(units, count)
        stays = self._uses[first] > 0
        self._uses[first[stays]] -= 1
        self._enter(first[stays], MAIN)
        return self._leave(first[~stays])

    def _first(self, units: np.ndarray, count: int) -> np.ndarray:
        return units[smallest(self._entered[units], count)]

    def _enter(self, units: np.ndarray, queue: int) -> None:
        self._queue[units] = queue
        self._entered[units] = self._num_entered + np.arange(units.size)
        self._num_entered += units.size

    def _leave(self, units: np.ndarray) -> np.ndarray:
        self._queue[units] = NOWHERE
        self._cached[units] = False
        return units
