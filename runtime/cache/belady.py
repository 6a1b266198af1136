"""Belady's policy, which knows all future requests (Belady 1966, cited by DIP 5.1): a bound for simulations.

After a request the cache holds the units, among those cached before and those just read, that are wanted again soonest,
so no cache of the same size has fewer misses. To reach this bound it may evict units that the current request has just
used. A policy of a real run may not, because their rows are in use.
"""

import numpy as np

from coldpress.runtime.cache._policy import CacheFacts, CachePolicy
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError

NEVER = np.iinfo(np.int64).max


class Plugin(CachePolicy):
    looks_ahead = True

    def __init__(self, known: CacheFacts, options: Record) -> None:
        """Raises `ColdpressError` if the future requests are not known."""
        super().__init__(known, options)
        if known.requests is None:
            raise ColdpressError(
                "the cache 'belady' has to know all requests to come, which a run does not; replay a trace with "
                "`coldpress simulate`, or choose another cache"
            )
        self._following = np.full(known.num_units, NEVER)
        """Number of the next request for each unit, counted from 0."""
        self._again = [np.empty(0, np.int64)] * len(known.requests)
        """By request: the number of the next request for each of its units."""
        for number in range(len(known.requests) - 1, -1, -1):
            ids = known.requests[number]
            self._again[number] = self._following[ids]
            self._following[ids] = number

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Raises `ValueError` if the request is not the one that was announced."""
        number = self._request
        if number >= len(self._again) or self._again[number].size != ids.size:
            raise ValueError(f"request {number} has {ids.size} units, which are not those that were to come")
        self._following[ids] = self._again[number]
        return super().touch(ids)

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return super().admit(ids[np.argsort(self._following[ids], kind="stable")])

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        old = np.flatnonzero(self._cached)
        victims = old[np.argsort(-self._following[old], kind="stable")][: candidates.size]
        # Victims come latest-wanted first and candidates soonest-wanted first, so profitable exchanges form a prefix.
        return victims[self._following[candidates[: victims.size]] < self._following[victims]]
