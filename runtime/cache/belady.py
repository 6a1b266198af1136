"""The cache that knows all requests to come: a bound for the others, in simulations alone.

Belady 1966, cited by DIP 5.1. After a request the cache holds those of its units, and of the request's, that are wanted
again soonest, so no cache of that size misses fewer. For that it may give up what the current request has just used, as
no policy does that rows in memory hang on.
"""

import numpy as np

from coldpress.runtime.cache._policy import Known, Policy
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError

NEVER = np.iinfo(np.int64).max


class Cache(Policy):
    """Ids in, ids out; see `Policy`."""

    looks_ahead = True

    def __init__(self, known: Known, options: Record) -> None:
        """See `Policy`.

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
        """When each unit of a request is requested again, by request."""
        for number in range(len(known.requests) - 1, -1, -1):
            ids = known.requests[number]
            self._again[number] = self._following[ids]
            self._following[ids] = number

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """See `Policy`.

        Raises:
            ValueError: if this is not the request that was to come.
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
        # Victims come sooner and candidates later, so those worth the exchange come first.
        return victims[self._following[candidates[: victims.size]] < self._following[victims]]
