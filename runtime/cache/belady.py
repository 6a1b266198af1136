"""The cache that knows all requests to come (Belady 1966, cited by DIP 5.1): a bound for the others, in simulations.

After a request the cache holds those units, of its own and of the request's, that are wanted again soonest, so no cache
of that size misses fewer. To be that bound it may evict units that the current request has just used, which a policy
of a real run may not: their rows are in use.
"""

import numpy as np

from coldpress.runtime.cache._policy import CachePolicy, Known
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError

NEVER = np.iinfo(np.int64).max


class Plugin(CachePolicy):
    """Evicts the unit that is wanted again last."""

    looks_ahead = True

    def __init__(self, known: Known, options: Record) -> None:
        """See `CachePolicy`.

        Raises:
            ColdpressError: if the requests to come are not known.
        """
        super().__init__(known, options)
        if known.requests is None:
            raise ColdpressError(
                "the cache 'belady' has to know all requests to come, which a run does not; replay a trace with "
                "`coldpress-run simulate`, or choose another cache"
            )
        self._following = np.full(known.num_units, NEVER)
        """The next request for each unit, counted from 0."""
        self._again = [np.empty(0, np.int64)] * len(known.requests)
        """By request: when each of its units is requested again."""
        for number in range(len(known.requests) - 1, -1, -1):
            ids = known.requests[number]
            self._again[number] = self._following[ids]
            self._following[ids] = number

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """See `CachePolicy`.

        Raises:
            ValueError: if another request was to come.
        """
        number = self._request
        if number >= len(self._again) or self._again[number].size != ids.size:
            raise ValueError(f"request {number} has {ids.size} units, which are not those that were to come")
        self._following[ids] = self._again[number]
        return super().touch(ids)

    def _wanted(self, ids: np.ndarray) -> np.ndarray:
        return ids[np.argsort(self._following[ids], kind="stable")]

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        old = np.flatnonzero(self._cached)
        victims = old[np.argsort(-self._following[old], kind="stable")][: candidates.size]
        # Along both lists victims return ever sooner and candidates ever later, so the exchanges that pay come first.
        return victims[self._following[candidates[: victims.size]] < self._following[victims]]
