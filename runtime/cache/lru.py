"""Least recently used: evicts the unit whose last request is longest ago; of several, the lowest id.

Units of one request count as used in the order of their ids, so this is the textbook policy fed one id at a time,
except that the current request is protected (runtime/cache/_policy.py). Requests wait in a queue; victims are the units
of the oldest request that no later request wanted. So the time of a request depends on its size, not on the family's.
"""

from collections import deque

import numpy as np

from coldpress.runtime.cache._policy import NOTHING, CachePolicy, Known
from coldpress.schemas.base import Record

LONGEST_QUEUE = 2
"""Bound on the ids in the queue, as a multiple of the family's units: without evictions the queue would grow for ever.
At least half the ids of a queue this long were requested again later, so that cleaning it up always makes room."""


class Plugin(CachePolicy):
    """Evicts by age."""

    def __init__(self, known: Known, options: Record) -> None:
        """See `CachePolicy`."""
        super().__init__(known, options)
        self._queue: deque[tuple[int, np.ndarray]] = deque()
        """Number of each request and its units, oldest first. Units that a later request wanted may be left out."""
        self._num_queued, self._most_queued = 0, LONGEST_QUEUE * known.num_units

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Queues the request; see `CachePolicy`."""
        if self._num_queued + ids.size > self._most_queued:
            left = ((request, self._still(request, found)) for request, found in self._queue)
            self._queue = deque((request, found) for request, found in left if found.size)
            self._num_queued = sum(found.size for _, found in self._queue)
        present = super().touch(ids)
        self._queue.append((self._request, ids))
        self._num_queued += ids.size
        return present

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        found, missing = [NOTHING], candidates.size
        while missing and self._queue[0][0] < self._request:
            request, ids = self._queue.popleft()
            old = self._still(request, ids)
            self._num_queued -= ids.size
            if old.size > missing:
                self._queue.appendleft((request, old[missing:]))
                self._num_queued += old.size - missing
            found.append(old[:missing])
            missing -= found[-1].size
        return np.concatenate(found)

    def _still(self, request: int, ids: np.ndarray) -> np.ndarray:
        """Returns the units of a request that are cached and that no later request wanted."""
        return ids[self._cached[ids] & (self._last_request[ids] == request)]
