"""What all cache policies share: which units are in, how many may be, and the protection of the current request.

A policy sees unit ids and returns unit ids. A request is one `touch` with all ids that are wanted, ascending, and then
at most one `admit` with those that were missing. No unit of the current request is ever evicted: its rows may be in
use, and evicting what this very token needs for something else that it needs can only lose. What does not fit is
refused. A token may make several requests; `end_tokens` says that it is over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.schemas.base import Record


@dataclass(frozen=True)
class Known:
    """What a policy knows of its family of a layer from the start."""

    num_units: int
    """Ids are below it."""
    capacity: int
    """Units that may be cached beside the pinned ones."""
    pinned: np.ndarray
    """Ids that are always in, integers."""
    position: np.ndarray
    """Integers [num_units], the unit's place on flash, in the order of its section; ids where no order is known yet."""
    requests: Sequence[np.ndarray] | None = None
    """All requests to come, ids of each in order; None but where a recorded trace is simulated."""


NOTHING = np.empty(0, np.int32)


class Policy:
    """The cache of one family of one layer; subclasses say which units to give up and which to let in."""

    admits = True
    """False where nothing ever comes in beside the pinned units, so that slots for it would be wasted."""
    looks_ahead = False
    """Whether it has to know all requests to come, so that it can only run where a trace is simulated; there no rows
    are in use, so it may evict units of the current request."""

    def __init__(self, known: Known, options: Record) -> None:
        """An empty cache; `options` is the plug-in's `Options`, or an empty record."""
        self.num_free = known.capacity
        """Units for which nothing would have to go."""
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
        """Begins a request for `ids` (distinct, ascending, not changed any more); which of them are in, bool [k]."""
        self._request += 1
        self._last_request[ids] = self._request
        return self.contains(ids)

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lets in what it sees fit of `ids`, the missing units of the current request.

        Returns:
            The admitted ids, and the ids that are evicted, none of them of the current request (see `looks_ahead`).
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
        """Says that the requests since the last call were those of `count` tokens, decoded together, and are over.

        Returns:
            The ids that are evicted now.
        """
        return NOTHING

    def resize(self, capacity: int, pinned: np.ndarray) -> None:
        """Gives it other room and other pinned units, between tokens.

        What is pinned no more goes, what is pinned now and was cached is cached no more, and of what is cached goes, in
        the policy's own order, what has no room. `present` says what is left.

        Args:
            capacity: Units that may be cached from now on.
            pinned: Ids, integers; the new ones count as present, wherever they come from.
        """
        self.touch(NOTHING)  # no unit is protected any more
        self._pinned[:] = False
        self._pinned[pinned] = True
        self.drop(np.flatnonzero(self._cached & self._pinned))
        excess = int(np.count_nonzero(self._cached)) - capacity
        if excess > 0:
            self._cached[self._oldest(excess)] = False
            self.drop(np.flatnonzero(self._cached)[capacity:])  # of a token that was given up
        self.num_free = capacity - int(np.count_nonzero(self._cached))

    def unpin(self, ids: np.ndarray) -> None:
        """Makes pinned units, ids, such as are neither pinned nor cached."""
        self._pinned[ids] = False

    def _oldest(self, count: int) -> np.ndarray:
        """The units to give up where room for `count` is taken away, in the order in which they go."""
        return self._victims(np.zeros(count, np.int64))

    def serve(self, ids: np.ndarray) -> np.ndarray:
        """A token whose one request is `ids`, from `touch` to `end_tokens`; which of them were in, bool [k]."""
        present = self.touch(ids)
        if not present.all():
            self.admit(ids[~present])
        self.end_tokens()
        return present

    def reset(self) -> None:
        """Begins a new context (another prompt); cached units stay."""

    def _wanted(self, ids: np.ndarray) -> np.ndarray:
        """The candidates for admission, in the order in which they get the room there is."""
        return ids

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        """The units to give up for the first of `candidates`, in the order in which they go."""
        raise NotImplementedError

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
