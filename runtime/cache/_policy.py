"""The base class of all cache policies: records cached and pinned units, and protects the current request.

A policy sees unit ids and returns unit ids. A request is one `touch` with all wanted ids, ascending, and then at most
one `admit` with the missing ids. A policy never evicts units of the current request: their rows may be in use, and
evicting one unit of a token for another of the same token gains nothing. Units that do not fit are refused. A token may
make several requests; `end_tokens` ends the token.
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
    """Whether the policy must know all future requests, so that it can only run in a simulation. No rows are in use
    there, so it may evict units of the current request."""

    def __init__(self, known: Known, options: Record) -> None:
        """Begins with an empty cache; `options` is a record of the plug-in's `OPTIONS`."""
        self.num_free = known.capacity
        """Units that can be admitted without an eviction."""
        self._pinned = np.zeros(known.num_units, bool)
        self._pinned[known.pinned] = True
        self._cached = np.zeros(known.num_units, bool)
        self._last_request = np.zeros(known.num_units, np.int32)
        """Number of each unit's last request; int32 lasts for eight months at a hundred tokens a second."""
        self._request = 0

    @property
    def present(self) -> np.ndarray:
        """bool [num_units]: pinned or cached."""
        return self._pinned | self._cached

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """bool [k]: which of `ids` are pinned or cached."""
        return self._pinned[ids] | self._cached[ids]

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Begins a request and returns which of `ids` are present, bool [k].

        `ids` are distinct and ascending. The caller must not change the array later, because policies keep it.
        """
        self._request += 1
        self._last_request[ids] = self._request
        return self.contains(ids)

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Admits as many of `ids`, the missing units of the current request, as the policy wants.

        Returns:
            The admitted and the evicted ids; no evicted id is in the current request, except under `looks_ahead`.
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
        """Forgets cached units, for example admitted units whose read failed."""
        self._cached[ids] = False
        self.num_free += ids.size

    def end_tokens(self, count: int = 1) -> np.ndarray:
        """Ends `count` tokens, which were decoded together and made all requests since the last call.

        Returns:
            The ids that the policy evicts at this moment.
        """
        return NOTHING

    def resize(self, capacity: int, pinned: np.ndarray) -> None:
        """Changes the capacity and the pinned units, between tokens.

        Units that are no longer pinned leave the cache. Newly pinned units no longer count as cached. If more units are
        cached than fit, the policy evicts the excess in its usual order. `present` shows the remaining units.

        Args:
            capacity: Units that may be cached from now on.
            pinned: Ids, integers; newly pinned units count as present, and the caller must load them.
        """
        self.touch(NOTHING)  # a new, empty request: no unit is protected any more
        self._pinned[:] = False
        self._pinned[pinned] = True
        self.drop(np.flatnonzero(self._cached & self._pinned))
        excess = int(np.count_nonzero(self._cached)) - capacity
        if excess > 0:
            self._cached[self._oldest(excess)] = False
            # A token that failed may have left cached units that are missing in the policy's queues, so `_oldest` may
            # not have found enough: drop any others.
            self.drop(np.flatnonzero(self._cached)[capacity:])
        self.num_free = capacity - int(np.count_nonzero(self._cached))

    def unpin(self, ids: np.ndarray) -> None:
        """Unpins units; they are not cached afterwards."""
        self._pinned[ids] = False

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

    def _wanted(self, ids: np.ndarray) -> np.ndarray:
        """Orders `ids` for admission, most wanted first."""
        return ids

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        """Returns the units to evict for the first of `candidates`, in order; at most one per candidate."""
        raise NotImplementedError(f"the cache {self.name()} says neither what it admits nor what it evicts")

    def _evictable(self) -> np.ndarray:
        """Returns the ids that are cached and not in the current request, ascending."""
        return np.flatnonzero(self._cached & (self._last_request < self._request))


def smallest(keys: np.ndarray, count: int) -> np.ndarray:
    """Returns the indices of the `count` smallest of `keys` (distinct integers), or of all if fewer; smallest first."""
    count = min(count, keys.size)
    if count < keys.size:
        chosen = np.argpartition(keys, count)[:count]
        return chosen[np.argsort(keys[chosen])]
    return np.argsort(keys)
