"""The base class of all cache policies: records cached and pinned units, and protects the current request.

A policy sees unit ids and returns unit ids. A request is one `touch` with all wanted ids, ascending, and then at most
one `admit` with the missing ids. A policy never evicts units of the current request: their rows may be in use, and
evicting one unit of a token for another of the same token gains nothing. Units that do not fit are refused. A token may
make several requests; `end_tokens` ends the token.

A policy stores few bytes about a unit, since a large model has millions of units: all that the base class knows is one
number, the unit's last request while it is cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coldpress.runtime.plugins import PluginBase
from coldpress.runtime.unit_numbers import number_type
from coldpress.schemas.base import Record


@dataclass(frozen=True)
class CacheFacts:
    num_units: int
    """Units of the family; ids are below it."""
    capacity: int
    """Units that may be cached in addition to the pinned ones."""
    pinned: np.ndarray
    """Ids that are always present, integers."""
    position: np.ndarray
    """Integers [num_units], each unit's place on flash within its section; its id if the order is not known yet."""
    requests: Sequence[np.ndarray] | None = None
    """All future requests, each an array of ids; only when a recorded trace is simulated."""


NOTHING = np.empty(0, np.int32)


class CachePolicy(PluginBase):
    """The cache of one family of one layer; subclasses choose which units to evict and which to admit."""

    admits: ClassVar[bool] = True
    """False if the policy admits no unit besides the pinned ones, so that slots for cached units would be wasted."""
    looks_ahead: ClassVar[bool] = False
    """True if the policy must know all future requests, so that it can only run in a simulation. No rows are in use
    there, so it may evict units of the current request."""

    def __init__(self, known: CacheFacts, options: Record) -> None:
        """Begins with an empty cache; `options` is a record of the plug-in's `OPTIONS`."""
        self.num_free = known.capacity
        """Units that can be admitted without an eviction."""
        self._last_request = np.zeros(known.num_units, number_type(known.num_units))
        """Number of the last request of each cached unit, counted from 1; 0 for units that are not in DRAM, and
        `_is_pinned` for pinned ones."""
        self._is_pinned = int(np.iinfo(self._last_request.dtype).max)
        self._last_request[known.pinned] = self._is_pinned
        self._request = 0

    @classmethod
    def kept_bytes(cls, num_units: int) -> int:
        """Returns the most bytes that the policy stores about a family of `num_units` units of a layer."""
        return num_units * number_type(num_units).itemsize

    @property
    def present(self) -> np.ndarray:
        """bool [num_units]: pinned or cached."""
        return self._last_request != 0

    @property
    def _cached(self) -> np.ndarray:
        """bool [num_units]: in the cache, without the pinned units."""
        return self._between(self._last_request, self._is_pinned)

    def _between(self, last_request: np.ndarray, stop: int) -> np.ndarray:
        """Returns where a number is above 0 and below `stop`: unsigned, so that 0 - 1 is the largest number."""
        return last_request - 1 < stop - 1

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """bool [k]: which of `ids` are pinned or cached."""
        return self._last_request[ids] != 0

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Begins a request and returns which of `ids` are present, bool [k]. `ids` are distinct and ascending. The
        caller must not change the array later, because policies keep it."""
        if self._request == self._is_pinned - 1:
            self._renumber()
        self._request += 1
        before = self._last_request[ids]
        self._last_request[ids[self._between(before, self._is_pinned)]] = self._request
        return before != 0

    def _renumber(self) -> None:
        """Numbers the last requests of cached units from 1 without gaps, since the numbers have run out."""
        cached = np.flatnonzero(self._cached)
        before, places = np.unique(self._last_request[cached], return_inverse=True)
        self._last_request[cached] = places + 1
        self._request = before.size
        self._renumbered(before)

    def _renumbered(self, before: np.ndarray) -> None:
        """Is told that request `before[i]`, integers ascending, is now number i + 1, and that all others are gone."""

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Admits as many of `ids`, missing units of the current request, as the policy wants: the first ones first.

        Returns the admitted and the evicted ids; no evicted id is in the current request, except under `looks_ahead`.
        """
        num_free = self.num_free
        evicted = self._victims(ids[num_free:]) if ids.size > num_free else ids[:0]
        admitted = ids[: num_free + evicted.size]
        self._last_request[evicted] = 0
        self._last_request[admitted] = self._request
        self.num_free += evicted.size - admitted.size
        return admitted, evicted

    def drop(self, ids: np.ndarray) -> None:
        """Forgets cached units, for example admitted units whose read failed."""
        self._last_request[ids] = 0
        self.num_free += ids.size

    def end_tokens(self, count: int = 1) -> np.ndarray:
        """Ends `count` tokens, which were decoded together and made all requests since the last call. Returns the ids
        that the policy evicts at this moment."""
        return NOTHING

    def resize(self, capacity: int, pinned: np.ndarray) -> None:
        """Changes the capacity and the pinned units, between tokens.

        Units that are no longer pinned leave the cache. Newly pinned units no longer count as cached: they count as
        present, and the caller must load them. If more units are cached than fit, the policy evicts the excess in its
        usual order. `present` shows the remaining units.
        """
        self.touch(NOTHING)  # a new, empty request: no unit is protected any more
        self._last_request[self._last_request == self._is_pinned] = 0
        self.drop(pinned[self.contains(pinned)])
        self._last_request[pinned] = self._is_pinned
        excess = int(np.count_nonzero(self._cached)) - capacity
        if excess > 0:
            self._last_request[self._oldest(excess)] = 0
            # A token that failed may have left cached units that are missing in the policy's queues, so `_oldest` may
            # not have found enough: drop any others.
            self.drop(np.flatnonzero(self._cached)[capacity:])
        self.num_free = capacity - int(np.count_nonzero(self._cached))

    def unpin(self, ids: np.ndarray) -> None:
        """Unpins units; they are not cached afterwards."""
        self._last_request[ids] = 0

    def _oldest(self, count: int) -> np.ndarray:
        """Returns the first `count` units to evict when the capacity shrinks, in order."""
        return self._victims(np.zeros(count, np.int64))

    def serve(self, ids: np.ndarray) -> np.ndarray:
        """Runs a whole token that makes one request; returns which of `ids` were present, bool [k]."""
        present = self.touch(ids)
        if not present.all():
            self.admit(ids[~present])
        self.end_tokens()
        return present

    def reset(self) -> None:
        """Begins a new context, for example another prompt; cached units stay."""

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        """Returns the units to evict for the first of `candidates`, in order; at most one per candidate."""
        raise NotImplementedError(f"the cache {self.name()} says neither what it admits nor what it evicts")

    def _evictable(self) -> np.ndarray:
        return self._between(self._last_request, self._request).nonzero()[0]


def smallest(keys: np.ndarray, count: int) -> np.ndarray:
    """Returns the indices of the `count` smallest of `keys`, or of all if fewer, in order; of equals the first ones."""
    if keys.size > count:  # sort only the keys that are not larger than the last one
        low = (keys <= np.partition(keys, count - 1)[count - 1]).nonzero()[0]
        return low[keys[low].argsort(kind="stable")][:count]
    return keys.argsort(kind="stable")
