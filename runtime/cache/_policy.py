"""What all cache policies share: which units are in, how many may be, and the protection of the current request.

A policy sees unit ids and returns unit ids. A request is one `touch` with all wanted ids, ascending, and then at most
one `admit` with the missing ones. No unit of the current request is ever evicted: its rows may be in use, and evicting
one unit of a token for another unit of the same token can only lose. Units that do not fit are refused. A token may
make several requests; `end_tokens` ends it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coldpress.runtime.plugins import PluginBase
from coldpress.schemas.base import Record


@dataclass(frozen=True)
class Known:
    """Facts about one family of one layer that a policy gets when it is made."""

    num_units: int
    """Ids are below it."""
    capacity: int
    """Units that may be cached beside the pinned ones."""
    pinned: np.ndarray
    """Ids that are always in, integers."""
    position: np.ndarray
    """Integers [num_units], the unit's place on flash, in the order of its section; ids where no order is known yet."""
    requests: Sequence[np.ndarray] | None = None
    """All requests to come, each an array of ids; only where a recorded trace is simulated."""


NOTHING = np.empty(0, np.int32)


class CachePolicy(PluginBase):
    """The cache of one family of one layer; subclasses choose which units to evict and which to admit."""

    admits: ClassVar[bool] = True
    """False if no unit is ever admitted beside the pinned ones, so that slots for it would be wasted."""
    looks_ahead: ClassVar[bool] = False
    """Whether it has to know all requests to come, so that it can only run where a trace is simulated. No rows are in
    use there, so it may evict units of the current request."""

    def __init__(self, known: Known, options: Record) -> None:
        """An empty cache; `options` is a record of the plug-in's `OPTIONS`."""
        self.num_free = known.capacity
        """Units that can be admitted before one has to be evicted."""
        self._pinned = np.zeros(known.num_units, bool)
        self._pinned[known.pinned] = True
        self._cached = np.zeros(known.num_units, bool)
        self._last_request = np.zeros(known.num_units, np.int32)
        """Number of each unit's last request; 2^31 of them are eight months at a hundred tokens a second."""
        self._request = 0

    @property
    def present(self) -> np.ndarray:
        """bool [num_units]: pinned or cached."""
        return self._pinned | self._cached

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """bool [k]: which of `ids` are pinned or cached."""
        return self._pinned[ids] | self._cached[ids]

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Begins a request for `ids` (distinct, ascending, never changed again); returns which are in, bool [k]."""
        self._request += 1
        self._last_request[ids] = self._request
        return self.contains(ids)

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Admits as many of `ids`, the missing units of the current request, as the policy wants.

        Returns:
            The admitted ids, and the evicted ids, none of them of the current request (see `looks_ahead`).
        """
        candidates = self._wanted(ids)
        num_free = self.num_free
        evicted = self._victims(candidates[num_free:]) if candidates.size > num_free else ids[:0]
        admitted = candidates[: num_free + evicted.size]
        self._cached[evicted] = False
        self._cached[admitted] = True
        self.num_free += evicted.size - admitted.size
        return admitted, evicted

    def drop(self, ids: np.ndarray) -> None:
        """Forgets cached units, such as admitted ones whose read failed."""
        self._cached[ids] = False
        self.num_free += ids.size

    def end_tokens(self, count: int = 1) -> np.ndarray:
        """Ends the `count` tokens, decoded together, that made the requests since the last call.

        Returns:
            The ids that are evicted now.
        """
        return NOTHING

    def resize(self, capacity: int, pinned: np.ndarray) -> None:
        """Changes the capacity and the pinned units, between tokens.

        Units that are no longer pinned leave. Newly pinned units stop counting as cached. If more units are cached than
        fit, the policy evicts the excess in its own order. `present` tells what is left.

        Args:
            capacity: Units that may be cached from now on.
            pinned: Ids, integers; the new ones count as present, and the caller loads them.
        """
        self.touch(NOTHING)  # a new, empty request: no unit is protected any more
        self._pinned[:] = False
        self._pinned[pinned] = True
        self.drop(np.flatnonzero(self._cached & self._pinned))
        excess = int(np.count_nonzero(self._cached)) - capacity
        if excess > 0:
            self._cached[self._oldest(excess)] = False
            # A token that was given up may have left more units than the policy's own books list.
            self.drop(np.flatnonzero(self._cached)[capacity:])
        self.num_free = capacity - int(np.count_nonzero(self._cached))

    def unpin(self, ids: np.ndarray) -> None:
        """Unpins units; they are not cached afterwards."""
        self._pinned[ids] = False

    def _oldest(self, count: int) -> np.ndarray:
        """The first `count` units to evict when the capacity shrinks, in order."""
        return self._victims(np.zeros(count, np.int64))

    def serve(self, ids: np.ndarray) -> np.ndarray:
        """Runs a whole token whose one request is `ids`; returns which of them were in, bool [k]."""
        present = self.touch(ids)
        if not present.all():
            self.admit(ids[~present])
        self.end_tokens()
        return present

    def reset(self) -> None:
        """Begins a new context (another prompt); cached units stay."""

    def _wanted(self, ids: np.ndarray) -> np.ndarray:
        """The candidates for admission, most wanted first."""
        return ids

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        """The units to evict for the first of `candidates`, in order; at most as many as there are candidates."""
        raise NotImplementedError(f"the cache {self.name()} says neither what it admits nor what it evicts")

    def _evictable(self) -> np.ndarray:
        """Ids that are cached and not part of the current request, ascending."""
        return np.flatnonzero(self._cached & (self._last_request < self._request))


def smallest(keys: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` smallest of `keys` (distinct integers), smallest first; fewer where there are fewer."""
    count = min(count, keys.size)
    if count < keys.size:
        chosen = np.argpartition(keys, count)[:count]
        return chosen[np.argsort(keys[chosen])]
    return np.argsort(keys)
