"""Contextual LFU with independent counters (ActiveFlow 4.2): evicts the unit used least often in this context.

Every unit of the layer has a counter, cached or not; each context starts all counters at zero (`reset`). Missing units
are admitted by falling count. Each replaces the least used cached unit if it has been used at least as often: of two
units with equal counts the one just used wins, as in the paper's Fig. 12. Victims with equal counts are evicted oldest
first, then lowest id first.
"""

import numpy as np

from coldpress.runtime.cache._policy import CacheFacts, CachePolicy
from coldpress.schemas.base import Record

MOST_USES = np.iinfo(np.uint16).max
"""Counters stop here: a context this long is longer than any model's. numpy sorts 16-bit numbers in linear time."""


class Plugin(CachePolicy):
    def __init__(self, known: CacheFacts, options: Record) -> None:
        super().__init__(known, options)
        self._uses = np.zeros(known.num_units, np.uint16)

    @classmethod
    def kept_bytes(cls, num_units: int) -> int:
        return super().kept_bytes(num_units) + 2 * num_units

    def touch(self, ids: np.ndarray) -> np.ndarray:
        uses = self._uses[ids]
        self._uses[ids] = uses + (uses < MOST_USES)
        return super().touch(ids)

    def reset(self) -> None:
        self._uses[:] = 0

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return super().admit(ids[np.argsort(MOST_USES - self._uses[ids], kind="stable")])

    def _oldest(self, count: int) -> np.ndarray:
        return self._least_used(self._evictable(), count)

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        # The first candidate is the most used one, so units used more often than it cannot be evicted.
        may_go = (self._uses <= self._uses[candidates[0]]) & self._between(self._last_request, self._request)
        victims = self._least_used(np.flatnonzero(may_go), candidates.size)
        # Victims' counts rise and candidates' counts fall, so profitable exchanges form a prefix.
        return victims[self._uses[candidates[: victims.size]] >= self._uses[victims]]

    def _least_used(self, old: np.ndarray, count: int) -> np.ndarray:
        uses = self._uses[old]
        if old.size > count:  # sort only the units with at most the last victim's count
            last = np.partition(uses, count - 1)[count - 1]
            old, uses = old[uses <= last], uses[uses <= last]
        return old[np.lexsort((self._last_request[old], uses))][:count]
