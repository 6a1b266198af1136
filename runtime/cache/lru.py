"""Least recently used: gives up the unit whose last request is longest ago; of those, the lowest id.

Units of one request count as used in the order of their ids, which makes this the textbook policy fed one id at a time,
except that the current request is protected (runtime/cache/_policy.py).
"""

import numpy as np

from runtime.cache._policy import Policy, smallest


class Cache(Policy):
    """Ids in, ids out; see `Policy`."""

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        old = self._evictable()
        # Distinct keys that sort by request, then id: argpartition gives no order among equals.
        return old[smallest(self._last_request[old] * self._cached.size + old, candidates.size)]
