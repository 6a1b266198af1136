"""S3-FIFO: a small queue that lets units pass which are wanted once, a main queue for those wanted again.

Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), Algorithm 1: a missing unit enters the small
queue, or the main one if it left the small one lately. The small queue has `small_share` of the room; a unit at its
end that was wanted twice since it came moves on to the main queue, others go and are remembered, as many as the main
queue holds. A unit at the end of the main queue that was wanted since it came begins anew with one use less. Units of
one request are in the order of their ids, and those of the current one are passed over. Queues are arrays, and units
are not taken from them one at a time: which go follows from their uses and places, in a few passes over the queues.
"""

import numpy as np
from pydantic import Field

from coldpress.runtime.cache._policy import NOTHING, Known, Policy
from coldpress.schemas.base import Record

MOST_USES = 3
MOST_LEFT = 1 << 30
MOVES_ON = 2
"""Uses in the small queue with which a unit moves on to the main one."""


class Options(Record):
    """The small queue."""

    small_share: float = Field(default=0.1, gt=0, lt=1, description="share of the slots that the small queue has")


class Cache(Policy):
    """Ids in, ids out; see `Policy`."""

    def __init__(self, known: Known, options: Options) -> None:
        """See `Policy`."""
        super().__init__(known, options)
        self._small_share = options.small_share
        self._share(known.capacity)
        self._small, self._main = NOTHING, NOTHING
        """Ids, those that came first in front."""
        self._uses = np.zeros(known.num_units, np.int8)
        self._left = np.full(known.num_units, -1, np.int32)
        """How many units had left the small queue for good when each of them did; -1 for none."""
        self._num_left = 0

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Counts the uses of what is cached; see `Policy`."""
        cached = ids[self._cached[ids]]
        self._uses[cached] = np.minimum(self._uses[cached] + 1, MOST_USES)
        return super().touch(ids)

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Policy`."""
        admitted, evicted = super().admit(ids)
        known = (self._left[admitted] >= 0) & (self._left[admitted] >= self._num_left - self._num_remembered)
        self._left[admitted] = -1
        self._uses[admitted] = 0
        self._small = np.concatenate([self._small, admitted[~known]])
        self._main = np.concatenate([self._main, admitted[known]])
        return admitted, evicted

    def drop(self, ids: np.ndarray) -> None:
        """See `Policy`."""
        super().drop(ids)
        self._small, self._main = (queue[self._cached[queue]] for queue in (self._small, self._main))

    def resize(self, capacity: int, pinned: np.ndarray) -> None:
        """See `Policy`."""
        self._share(capacity)
        super().resize(capacity, pinned)

    def _share(self, capacity: int) -> None:
        """Divides the room between the queues."""
        self._room = max(1, round(self._small_share * capacity))
        self._num_remembered = capacity - self._room

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        found = self._pass_small(candidates.size)
        if found.size < candidates.size:
            found = np.concatenate([found, self._pass_main(candidates.size - found.size)])
        if found.size < candidates.size:
            found = np.concatenate([found, self._empty_small(candidates.size - found.size)])
        return found

    def _pass_small(self, count: int) -> np.ndarray:
        """What leaves the small queue while it has more than its room, until `count` units have gone for good."""
        places = self._places(self._small)[: max(0, self._small.size - self._room)]
        goes = self._uses[self._small[places]] < MOVES_ON
        places = places[: np.searchsorted(np.cumsum(goes), count) + 1]
        units, goes = self._small[places], goes[: places.size]
        self._small = np.delete(self._small, places)
        self._uses[units[~goes]] = 0
        self._main = np.concatenate([self._main, units[~goes]])
        return self._remember(units[goes])

    def _pass_main(self, count: int) -> np.ndarray:
        """The first `count` units that go while the main queue is gone through, over and over.

        A unit goes in the round that has as many before it as it has uses left, so the order in which they go is that
        of uses, then places. The last one says how often each of the others was passed, and had one use less for it.
        """
        places = self._places(self._main)
        units = self._main[places]
        uses = self._uses[units]
        order = np.argsort(uses, kind="stable")[:count]
        if not order.size:
            return NOTHING
        rounds, last = uses[order[-1]], order[-1]
        stays = np.ones(units.size, bool)
        stays[order] = False
        passed = np.arange(units.size) <= last
        """In the last round; the others were passed last in the one before, if there was one."""
        self._uses[units[stays]] = (uses - rounds - passed)[stays]
        moved = passed | (rounds > 0)
        behind = [units[stays & moved & ~passed], units[stays & passed]]
        self._main = np.concatenate([np.delete(self._main, places[~stays | moved]), *behind])
        return units[order]

    def _empty_small(self, count: int) -> np.ndarray:
        """The first `count` units of the small queue, where the main one has none to give.

        One that moves on is the only one there that may go, so it goes, too, and is not remembered.
        """
        places = self._places(self._small)[:count]
        units = self._small[places]
        self._small = np.delete(self._small, places)
        self._remember(units[self._uses[units] < MOVES_ON])
        return units

    def _places(self, queue: np.ndarray) -> np.ndarray:
        """Where units are in a queue that are not of the current request."""
        return np.flatnonzero(self._last_request[queue] < self._request)

    def _remember(self, gone: np.ndarray) -> np.ndarray:
        if self._num_left > MOST_LEFT:  # counted anew, from those that are remembered
            self._left = np.maximum(self._left - (self._num_left - self._num_remembered), -1)
            self._num_left = self._num_remembered
        self._left[gone] = self._num_left + np.arange(gone.size, dtype=np.int32)
        self._num_left += gone.size
        return gone
