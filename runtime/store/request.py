"""Units on their way into memory: requests and dense passes, which yield batches as reads land."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.store import planner
from coldpress.runtime.store.ahead import EarlyUnits
from coldpress.runtime.store.facts import Purpose
from coldpress.runtime.store.reads import Device, FamilyMemory, Incoming, PlannedUnits, in_buffer
from coldpress.runtime.store.slot_memory import copy_rows
from coldpress.runtime.store.slots import Part

ARRIVAL_BYTES = 1 << 20
"""Least bytes read between two batches of a request: smaller batches cost more in calls than overlap saves."""


@dataclass(frozen=True)
class Batch:
    """Units that are in memory until the next batch is taken: `rows[slots[i]]` is unit `ids[i]`."""

    ids: np.ndarray
    """int32 [m]."""
    slots: np.ndarray
    """int32 [m]."""
    rows: np.ndarray
    """uint8 [slots, unit_bytes]; rows may overlap."""


class Request:
    """Units on their way into memory; iterate over a request once to get them in batches.

    The first batches hold units in memory, the next units read ahead, the last the other units, as reads land. Use a
    batch before taking the next one, which may overwrite units without a slot. If a request fails or is closed early,
    the cache forgets the units that were not read. `Store.submit` closes the previous request.
    """

    def __init__(self, ready: tuple[Batch, ...], rest: "Rest | None" = None) -> None:
        """Takes the batches in memory (`ready`), and the units that are read or were read ahead (`rest`)."""
        self._ready, self._rest = ready, rest

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches that together hold each requested unit exactly once.

        Raises:
            CorruptPageError: if a page read is damaged.
            DeviceError: if the device fails twice.
        """
        return iter(self._ready) if self._rest is None else self._rest.batches(self._ready)

    def close(self) -> None:
        """Gives up the units that have not arrived."""
        if self._rest is not None:
            self._rest.close()


class Rest:
    """The units of a request that were not in DRAM."""

    def __init__(
        self,
        device: Device,
        part: Part,
        memory: FamilyMemory,
        planned: PlannedUnits,
        early: list[EarlyUnits],
        evicted_hits: Batch | None,
        replan: Callable[[np.ndarray], PlannedUnits],
    ) -> None:
        """Begins the reads.

        Args:
            device: Reads, and tells observers.
            part: The units' part.
            memory: Where the units go.
            planned: The units that are read now.
            early: The units that were read ahead.
            evicted_hits: Units in slots that the reads will overwrite; the reads begin after they have been used.
            replan: Plans the reads of `early` units whose reads failed.
        """
        self._device, self._part, self._memory, self._replan = device, part, memory, replan
        self._planned, self._early, self._evicted_hits = [planned], early, evicted_hits
        self._incoming: Incoming | None = None
        if evicted_hits is None:
            self._begin()

    def _begin(self) -> None:
        planned = self._planned[-1]
        batches = planner.batches(planned.plan, self._memory.room_bytes)
        try:
            self._incoming = Incoming(self._device, Purpose.REQUEST, batches, self._memory, planned)
        except BaseException:  # flash/serial.py reads inside `submit`, so reads can fail here
            self.close()
            raise

    def batches(self, ready: tuple[Batch, ...]) -> Iterator[Batch]:
        """See `Request`."""
        try:
            if self._evicted_hits is not None:
                # under `use_read_units` a token may use units that its own request evicts: they come first, because
                # the reads will overwrite their slots
                yield self._evicted_hits
                self._begin()
            yield from ready
            for early in self._early:
                yield from self._read_ahead(early)
            while self._incoming is not None:
                planned = self._planned[-1]
                for batch, ticket, half in self._incoming:
                    # where no data moves nobody computes meanwhile, and one arrival is as good as many
                    least_bytes = ARRIVAL_BYTES if self._device.flash.moves_data else batch.extents.num_bytes
                    for first, stop, count in planner.arrivals(batch, self._part.units.unit_bytes, least_bytes):
                        ticket.wait(count)
                        ids = planned.ids[planned.num_read : batch.first_unit + stop]
                        planned.num_read = batch.first_unit + stop
                        # stored units, too, are used where they landed: one batch costs less than one for each place
                        yield Batch(ids, batch.buffer_offset[first:stop].astype(np.int32), half.rows)
                    self._device.ended(Purpose.REQUEST, batch, ticket.finish())
                self._incoming = None
                self._read_lost()
        finally:
            self.close()

    def _read_lost(self) -> None:
        """Reads the units whose reads ahead failed without an error so far; if data is damaged, that raises it."""
        lost = [units for early in self._early if (units := early.give_up()).size]
        if lost:
            self._planned.append(self._replan(np.concatenate(lost)))
            self._begin()

    def _read_ahead(self, early: EarlyUnits) -> Iterator[Batch]:
        """Yields units that were read ahead, as they arrive; copies those that the cache admitted to their slots."""
        for ids, places in early.arrivals(ARRIVAL_BYTES):
            stored = self._part.cache.contains(ids)
            if self._device.flash.moves_data:
                copy_rows(early.rows, places[stored], self._memory.slots.rows, self._part.slots(ids[stored]))
            yield Batch(ids, places, early.rows)

    def close(self) -> None:
        """See `Request`; does nothing the second time."""
        if self._incoming is not None:
            self._incoming.close()
        for units in (*self._planned, *self._early):
            if units.unread.size:
                self._part.forget(units.unread)
        self._planned, self._early, self._incoming = [], [], None


class DensePass:
    """All units of a part on their way into memory; iterate over it once."""

    def __init__(self, device: Device, part: Part, memory: FamilyMemory, batches: Iterable[planner.ReadBatch]) -> None:
        """Begins the first reads of `batches`, which cover all units of the part."""
        self._device, self._part = device, part
        self._incoming = Incoming(device, Purpose.STREAM, batches, memory)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (unit ids int32 [m], rows uint8 [m, unit_bytes]), as many as half of the read buffer holds, while
        reads fill the other half. A buffer that is not halved gives all its units at once. The rows are views of the
        buffer; the next step overwrites them.

        Raises:
            CorruptPageError: if a page read is damaged.
        """
        try:
            for batch, ticket, half in self._incoming:
                self._device.ended(Purpose.STREAM, batch, ticket.finish())
                ids = self._part.units_at(slice(batch.first_unit, batch.first_unit + batch.buffer_offset.size))
                yield ids, in_buffer(half, batch.buffer_offset, self._part.units)
        finally:
            self.close()

    def close(self) -> None:
        """Gives up the units that have not arrived."""
        self._incoming.close()


class ResidentPass:
    """All units of a part that holds every unit in its slots; iterate over it as over a `DensePass`."""

    def __init__(self, part: Part, rows: np.ndarray, batches: Iterable[planner.ReadBatch]) -> None:
        """Takes units from `rows`, uint8 [slots, unit_bytes], in the sizes of `batches`; reads nothing."""
        self._part, self._rows, self._batches = part, rows, batches

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `DensePass`; the rows are views of the slots, where pinned units lie in flash order."""
        first_slot = self._part.first_slot
        for batch in self._batches:
            units = slice(batch.first_unit, batch.first_unit + batch.buffer_offset.size)
            yield self._part.units_at(units), self._rows[first_slot + units.start : first_slot + units.stop]

    def close(self) -> None:
        """Does nothing: there are no reads."""
