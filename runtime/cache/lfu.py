"""Contextual LFU with independent counters (ActiveFlow 4.2): gives up the unit used least often in this context.

Every unit of the layer has a counter, cached or not; all start at zero with each context (`reset`). Missing units come
in by falling count, and each takes the place of the least used cached unit if it has been used at least as often: of
two with equal counts the one just used wins, as in the paper's Fig. 12. Equal counts among victims: the older, then
lower id.
"""

import numpy as np

from runtime.cache._policy import Known, Policy
from schemas.base import Record


class Cache(Policy):
    """Ids in, ids out; see `Policy`."""

    def __init__(self, known: Known, options: Record) -> None:
        """See `Policy`."""
        super().__init__(known, options)
        self._uses = np.zeros(known.num_units, np.int64)

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Counts the uses; see `Policy`."""
        self._uses[ids] += 1
        return super().touch(ids)

    def reset(self) -> None:
        """A new context: all counters are zero."""
        self._uses[:] = 0

    def _wanted(self, ids: np.ndarray) -> np.ndarray:
        return ids[np.argsort(-self._uses[ids], kind="stable")]

    def _oldest(self, count: int) -> np.ndarray:
        old = self._evictable()
        order = np.lexsort((old, self._last_request[old], self._uses[old]))
        return old[order[:count]]

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        victims = self._oldest(candidates.size)
        # Victims rise and candidates fall, so those worth the exchange come first.
        return victims[self._uses[candidates[: victims.size]] >= self._uses[victims]]
