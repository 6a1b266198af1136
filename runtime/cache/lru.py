"""Least recently used: gives up the unit whose last request is longest ago; of those, the lowest id.

Units of one request count as used in the order of their ids, which makes this the textbook policy fed one id at a time,
except that the current request is protected (runtime/cache/_policy.py). Requests wait in a queue, and the oldest is
asked for those of its units that no later one wanted: what a request costs is its own size, not the family's.
"""

from collections import deque

import numpy as np

from coldpress.runtime.cache._policy import NOTHING, Known, Policy
from coldpress.schemas.base import Record

LONGEST_QUEUE = 2
"""In units of the family; where nothing has to go, the queue would grow for ever. At most half is not wanted again."""


class Cache(Policy):
    """Ids in, ids out; see `Policy`."""

    def __init__(self, known: Known, options: Record) -> None:
        """See `Policy`."""
        super().__init__(known, options)
        self._queue: deque[tuple[int, np.ndarray]] = deque()
        """Number of a request and its units, those that are known to be wanted again left out; oldest first."""
        self._num_queued, self._most_queued = 0, LONGEST_QUEUE * known.num_units

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Takes down the request; see `Policy`."""
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
        """Those of a request's units that are cached, and that no later one wanted."""
        return ids[self._cached[ids] & (self._last_request[ids] == request)]
