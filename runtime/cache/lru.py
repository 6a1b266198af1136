"""Least recently used: evicts the unit whose last request is longest ago; of several, the lowest id.

Units of one request count as used in the order of their ids, so this is the textbook policy fed one id at a time,
except that the current request is protected (runtime/cache/_policy.py).
"""

import numpy as np

from coldpress.runtime.cache._policy import CachePolicy, smallest


class Plugin(CachePolicy):
    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        old = self._evictable()
        return old[smallest(self._last_request[old], candidates.size)]
