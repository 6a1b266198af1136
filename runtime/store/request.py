"""One request on its way into memory: batches of reads in flight, and the units that they bring, as they land."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from coldpress.runtime.flash import Flash, Landing, Ticket
from coldpress.runtime.store import planner
from coldpress.runtime.store.facts import Observers, Purpose
from coldpress.runtime.store.memory import Half, PoolMemory, copy_rows
from coldpress.runtime.store.preload import PreloadedUnits
from coldpress.runtime.store.slots import Part

Reads = TypeVar("Reads", bound=planner.ReadBatch)


@dataclass(frozen=True)
class Batch:
    """Units that are in memory until the next batch is taken: `rows[slots[i]]` is unit `ids[i]`."""

    ids: np.ndarray
    """int32 [m]."""
    slots: np.ndarray
    """int32 [m]."""
    rows: np.ndarray
    """uint8 [slots, unit_bytes]; rows may overlap."""

    def some(self, chosen: np.ndarray) -> "Batch":
        return Batch(self.ids[chosen], self.slots[chosen], self.rows)


@dataclass
class PlannedUnits:
    """Units of a read plan, in flash order, with their slots."""

    plan: planner.ReadPlan
    ids: np.ndarray
    """int32 [k]."""
    stored: np.ndarray
    """bool [k]: whether the unit goes to its slot."""
    slots: np.ndarray
    """int32 [k]; meaningless where a unit is not stored."""
    num_read: int = 0
    """Units that are in memory."""


class Device:
    """The flash as a store reads it: observers are told of every batch of reads."""

    def __init__(self, flash: Flash, observers: Observers) -> None:
        self.flash, self.observers = flash, observers

    def begin(
        self, purpose: Purpose, batch: planner.ReadBatch, into: np.ndarray, landing: Landing | None = None
    ) -> Ticket:
        """Begins the reads of a batch; raises as `coldpress.runtime.flash.Flash.submit`."""
        for began in self.observers.began:
            began(purpose, batch)
        return self.flash.submit(batch.extents, into, landing)


class Incoming(Generic[Reads]):
    """Batches of reads in order: one in flight in each half of the buffer, the others follow."""

    def __init__(
        self,
        device: Device,
        purpose: Purpose,
        batches: Iterable[Reads],
        memory: PoolMemory,
        planned: PlannedUnits | None = None,
    ) -> None:
        """Begins the first reads of `batches`, which are in order. With `planned` units, those that are stored are
        copied to their slots as they arrive."""
        self._device, self._purpose, self._batches = device, purpose, iter(batches)
        self._planned, self._rows = planned if device.flash.moves_data else None, memory.slots.rows
        self._under_way: deque[tuple[Reads, Ticket, Half]] = deque()
        try:
            for half in memory.halves:
                self._begin_next(half)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[tuple[Reads, Ticket, Half]]:
        """Yields each batch, its reads, and the half they land in; the next step waits for the rest of these reads, and
        begins to overwrite that half."""
        while self._under_way:
            batch, ticket, half = self._under_way[0]
            yield batch, ticket, half
            waited_s = ticket.finish()
            for ended in self._device.observers.ended:
                ended(self._purpose, batch.extents.offsets.size, batch.extents.num_bytes, waited_s)
            self._under_way.popleft()
            self._begin_next(half)

    def _begin_next(self, half: Half) -> None:
        batch = next(self._batches, None)
        if batch is None:
            return
        landing, planned = None, self._planned
        if planned is not None:
            units = slice(batch.first_unit, batch.first_unit + batch.buffer_offset.size)
            stored = planned.stored[units]
            if stored.any():
                landing = Landing(batch.buffer_offset[stored], planned.slots[units][stored], self._rows)
        ticket = self._device.begin(self._purpose, batch, half.memory, landing)
        self._under_way.append((batch, ticket, half))

    def close(self) -> None:
        """Abandons the reads in flight; afterwards no read writes to a buffer."""
        while self._under_way:
            self._under_way.popleft()[1].abandon()


class Request:
    """Units on their way into memory; iterate over a request once to get them in batches.

    The first batches hold units in memory, the next units preloaded, the last the other units, as reads land. Use a
    batch before taking the next one, which may overwrite units without a slot. If a request fails or is closed early,
    the cache forgets the units that were not read. `Store.submit` closes the previous request.
    """

    def __init__(
        self,
        device: Device,
        part: Part,
        memory: PoolMemory,
        resident: Batch,
        evicted_hits: Batch | None,
        planned: PlannedUnits,
        preloaded: list[PreloadedUnits],
        replan: Callable[[np.ndarray], PlannedUnits],
    ) -> None:
        """Begins the reads, unless they would overwrite units that the token uses first.

        Args:
            evicted_hits: Other units in memory, whose slots the reads will overwrite: `use_read_units` lets a token use
                units that its own request evicts.
            planned: The units that are read now.
            replan: Plans the reads of `preloaded` units whose reads failed.
        """
        self._device, self._part, self._memory, self._replan = device, part, memory, replan
        self._resident, self._evicted_hits, self._planned, self._preloaded = resident, evicted_hits, planned, preloaded
        self._incoming: Incoming[planner.ReadBatch] | None = None
        if evicted_hits is None:
            self._begin(planned)

    def _begin(self, planned: PlannedUnits) -> None:
        self._planned = planned
        batches = planner.batches(planned.plan, self._memory.room_bytes)
        try:
            self._incoming = Incoming(self._device, Purpose.REQUEST, batches, self._memory, planned)
        except BaseException:  # flash/serial.py reads inside `submit`, so reads can fail here
            self.close()
            raise

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches that together hold each requested unit exactly once. Raises `CorruptPageError` if a page read
        is damaged, `DeviceError` if the device fails twice."""
        try:
            if self._evicted_hits is not None:
                yield self._evicted_hits
                self._begin(self._planned)
            if self._resident.ids.size:
                yield self._resident
            for one in self._preloaded:
                yield from self._from_region(one)
            while self._incoming is not None:
                for batch, ticket, half in self._incoming:
                    # portions let a token compute before the rest lands; a simulation neither computes nor waits
                    least_bytes = planner.ARRIVAL_BYTES if self._device.flash.moves_data else batch.extents.num_bytes
                    for first, stop, count in planner.arrivals(batch, half.rows.shape[1], least_bytes):
                        ticket.wait(count)
                        ids = self._planned.ids[self._planned.num_read : batch.first_unit + stop]
                        self._planned.num_read = batch.first_unit + stop
                        # stored units, too, are used where they landed: one batch costs less than one for each place
                        yield Batch(ids, batch.buffer_offset[first:stop].astype(np.int32), half.rows)
                self._incoming = None
                if self._preloaded:
                    self._read_lost()
        finally:
            self.close()

    def _from_region(self, preloaded: PreloadedUnits) -> Iterator[Batch]:
        """Yields units that were preloaded, as they arrive; copies those that the cache admitted to their slots."""
        for ids, places in preloaded.arrivals(planner.ARRIVAL_BYTES):
            stored = self._part.cache.contains(ids)
            if self._device.flash.moves_data:
                copy_rows(preloaded.rows, places[stored], self._memory.slots.rows, self._part.slots(ids[stored]))
            yield Batch(ids, places, preloaded.rows)

    def _read_lost(self) -> None:
        """Reads the units whose preloads failed without an error so far; if data is damaged, that raises it."""
        lost = [units for one in self._preloaded if (units := one.give_up()).size]
        if lost:
            self._begin(self._replan(np.concatenate(lost)))

    def close(self) -> None:
        """Gives up the units that have not arrived; does nothing the second time."""
        if self._incoming is not None:
            self._incoming.close()
        for units in (self._planned, *self._preloaded):
            if units.num_read < units.ids.size:
                self._part.forget(units.ids[units.num_read :])
                units.num_read = units.ids.size
