"""S3-FIFO: a small queue for units that may be wanted only once, a main queue for units that were wanted again.

Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), Algorithm 1. A missing unit enters the small
queue, or the main queue if it left the small one recently. The small queue has `small_share` of the room. The oldest
unit of the small queue moves to the main queue if it was used twice since it entered; otherwise it is evicted and
remembered. As many evicted units are remembered as the main queue holds. The oldest unit of the main queue goes back to
the end of the queue with one use less if it has uses left; otherwise it is evicted. Units of one request enter in the
order of their ids; units of the current request are skipped.

The paper takes units from the queues one at a time. Here queues are arrays, and a few passes over them find all units
that one-at-a-time eviction would take, because the order depends only on uses and places.
"""

import numpy as np
from pydantic import Field

from coldpress.runtime.cache._policy import NOTHING, CacheFacts, CachePolicy
from coldpress.runtime.unit_numbers import number_type
from coldpress.schemas.base import Record

MOST_USES = 3
"""The paper's counter has two bits."""
MOVES_ON = 2
"""Uses in the small queue that move a unit to the main one."""


class Options(Record):
    small_share: float = Field(default=0.1, gt=0, lt=1, description="share of the slots that the small queue has")


class Plugin(CachePolicy):
    OPTIONS = Options

    def __init__(self, known: CacheFacts, options: Options) -> None:
        super().__init__(known, options)
        self._small_share = options.small_share
        self._share(known.capacity)
        self._small = self._main = NOTHING.astype(self._last_request.dtype)
        """Ids in each queue, oldest first."""
        self._uses = np.zeros(known.num_units, np.int8)
        self._left = np.zeros(known.num_units, number_type(2 * known.num_units))
        """Number of each unit's departure from the small queue, counted over all units from 1; 0 if not remembered.
        Stands for the paper's ghost queue: a unit is in it if its number is among the last `_num_remembered`."""
        self._num_left = 0

    @classmethod
    def kept_bytes(cls, num_units: int) -> int:
        a_unit = 1 + number_type(2 * num_units).itemsize + number_type(num_units).itemsize
        return super().kept_bytes(num_units) + a_unit * num_units

    def touch(self, ids: np.ndarray) -> np.ndarray:
        cached = ids[self._between(self._last_request[ids], self._is_pinned)]
        self._uses[cached] = np.minimum(self._uses[cached] + 1, MOST_USES)
        return super().touch(ids)

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        admitted, evicted = super().admit(ids)
        # Admission follows eviction, so the departures of this very call already push older ones out of the memory.
        known = self._left[admitted] > max(0, self._num_left - self._num_remembered)
        self._left[admitted] = 0
        self._uses[admitted] = 0
        queued = admitted.astype(self._small.dtype)
        self._small = np.concatenate([self._small, queued[~known]])
        self._main = np.concatenate([self._main, queued[known]])
        return admitted, evicted

    def drop(self, ids: np.ndarray) -> None:
        super().drop(ids)
        self._small, self._main = (queue[self.contains(queue)] for queue in (self._small, self._main))

    def resize(self, capacity: int, pinned: np.ndarray) -> None:
        self._share(capacity)
        super().resize(capacity, pinned)

    def _share(self, capacity: int) -> None:
        self._room = max(1, round(self._small_share * capacity))
        self._num_remembered = capacity - self._room

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        found = self._pass_small(candidates.size)
        if found.size < candidates.size:
            found = np.concatenate([found, self._pass_main(candidates.size - found.size)])
        if found.size < candidates.size:
            found = np.concatenate([found, self._empty_small(candidates.size - found.size)])
        return found.astype(np.int32)

    def _pass_small(self, count: int) -> np.ndarray:
        """Takes units from the small queue until it fits its room or `count` units are evicted; returns the evicted."""
        places = self._places(self._small)[: max(0, self._small.size - self._room)]
        goes = self._uses[self._small[places]] < MOVES_ON
        # One-at-a-time eviction would stop at the `count`-th evicted unit, and leave the units behind it untouched.
        places = places[: np.searchsorted(np.cumsum(goes), count) + 1]
        units, goes = self._small[places], goes[: places.size]
        self._small = np.delete(self._small, places)
        self._uses[units[~goes]] = 0
        self._main = np.concatenate([self._main, units[~goes]])
        return self._remember(units[goes])

    def _pass_main(self, count: int) -> np.ndarray:
        """Evicts the first `count` units of the main queue, going through it round by round.

        A unit with n uses left survives n rounds, so units are evicted by uses, then by place. The place and the uses
        of the last evicted unit tell how often each other unit was passed; each pass takes one use.
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
        """bool: passed in the last round; the other units were last passed in the round before, if there was one."""
        self._uses[units[stays]] = (uses - rounds - passed)[stays]
        moved = passed | (rounds > 0)
        # A passed unit goes to the end, so the units passed in the last round come after those of the round before.
        behind = [units[stays & moved & ~passed], units[stays & passed]]
        self._main = np.concatenate([np.delete(self._main, places[~stays | moved]), *behind])
        return units[order]

    def _empty_small(self, count: int) -> np.ndarray:
        """Evicts the first `count` units of the small queue, when the main queue has no unit left to evict.

        A unit used often enough would move to the main queue and be the only unit there that may be evicted, so it is
        evicted at once. It is not remembered, because units evicted from the main queue are not.
        """
        places = self._places(self._small)[:count]
        units = self._small[places]
        self._small = np.delete(self._small, places)
        self._remember(units[self._uses[units] < MOVES_ON])
        return units

    def _places(self, queue: np.ndarray) -> np.ndarray:
        """Returns the places in a queue of the units that are not in the current request, ascending."""
        return np.flatnonzero(self._last_request[queue] != self._request)

    def _remember(self, gone: np.ndarray) -> np.ndarray:
        if self._num_left + gone.size > np.iinfo(self._left.dtype).max:  # number those that are still remembered from 1
            forgotten = max(0, self._num_left - self._num_remembered)
            self._left = np.where(self._left > forgotten, self._left - forgotten, 0).astype(self._left.dtype)
            self._num_left -= forgotten
        self._left[gone] = self._num_left + 1 + np.arange(gone.size)
        self._num_left += gone.size
        return gone
