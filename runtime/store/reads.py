"""Carries out a store's read plans: batches of reads in flight in the halves of a buffer. Decides nothing."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.extents import span_bytes
from coldpress.runtime.flash import Landing, Reader, Ticket
from coldpress.runtime.store import planner
from coldpress.runtime.store.facts import Observers, Purpose
from coldpress.runtime.store.slot_memory import SlotMemory
from coldpress.schemas.device import Flash, flash_seconds

COPY_BYTES = 1 << 20
"""Bytes of units that are moved at a time inside a read buffer."""
MAX_READ_BYTES = 512 << 10
"""Longest single read: devices reach peak bandwidth with less, and longer reads leave fewer to run in parallel."""
LEAST_HALF_BYTES = 128 << 10
"""Below this, the buffer is not halved: more batches would read more pages twice, for the units on both sides."""


def room_bytes(buffer_bytes: int, page_bytes: int, least_bytes: int) -> int:
    """Returns the bytes of a read buffer that one batch may take: half, so that the other half can be used meanwhile,
    or the whole buffer if half is too small.

    Args:
        buffer_bytes: Size of the buffer, whole pages.
        page_bytes: Size of a page.
        least_bytes: Bytes that must fit.
    """
    half = buffer_bytes // 2 // page_bytes * page_bytes
    return half if half >= max(LEAST_HALF_BYTES, least_bytes) else buffer_bytes


def longest_read_bytes(room: int, unit_bytes: int, page_bytes: int) -> int:
    """Returns the longest single read if a batch has `room` bytes; a unit always fits."""
    return max(min(MAX_READ_BYTES, room), span_bytes(unit_bytes, page_bytes))


@dataclass(frozen=True)
class Half:
    """A part of the read buffer; one half is filled while the other is used."""

    memory: np.ndarray
    """uint8 [size]."""
    rows: np.ndarray
    """uint8 [size - unit_bytes + 1, unit_bytes], a view with overlapping rows: row i begins at byte i.

    So kernels can take a byte offset as a row number, and units in the buffer need no copy.
    """


def halves(buffer: np.ndarray, unit_bytes: int, page_bytes: int) -> list[Half]:
    """Divides a read buffer into parts of `room_bytes` for units of one size."""
    room = room_bytes(buffer.size, page_bytes, span_bytes(unit_bytes, page_bytes))
    parts = (buffer[start : start + room] for start in range(0, buffer.size - room + 1, room))
    return [Half(part, np.lib.stride_tricks.sliding_window_view(part, unit_bytes)) for part in parts]


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

    @property
    def unread(self) -> np.ndarray:
        """int32, the units that are not in memory yet."""
        return self.ids[self.num_read :]


@dataclass
class FamilyMemory:
    """The memory of a family's units: slots for cached units, and the read buffer."""

    slots: SlotMemory
    halves: list[Half]
    room_bytes: int
    """Bytes of the read buffer that one batch of reads may take."""
    longest_read_bytes: int


class Incoming:
    """Batches of reads in order: one in flight in each half of the buffer, the others follow."""

    def __init__(
        self,
        device: "Device",
        purpose: Purpose,
        batches: Iterable[planner.ReadBatch],
        memory: FamilyMemory,
        planned: PlannedUnits | None = None,
    ) -> None:
        """Begins the first reads of `batches`.

        Args:
            device: Reads, and tells observers.
            purpose: Why.
            batches: In order.
            memory: Its halves are read into.
            planned: The units of the batches, if those that are stored are to be copied to their slots as they arrive.
        """
        self._device, self._purpose, self._batches = device, purpose, iter(batches)
        self._planned, self._rows = planned, memory.slots.rows
        self._under_way: deque[tuple[planner.ReadBatch, Ticket, Half]] = deque()
        try:
            for half in memory.halves:
                self._begin_next(half)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[tuple[planner.ReadBatch, Ticket, Half]]:
        """Yields each batch, its reads, and the half they land in; the next step begins to overwrite that half."""
        while self._under_way:
            yield self._under_way[0]
            self._begin_next(self._under_way.popleft()[2])

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


class Device:
    """The flash as a store reads it: observers are told of every batch of reads."""

    def __init__(self, flash: Reader, observers: Observers) -> None:
        """Reads with `flash`."""
        self.flash, self._observers = flash, observers

    def begin(
        self, purpose: Purpose, batch: planner.ReadBatch, into: np.ndarray, landing: Landing | None = None
    ) -> Ticket:
        """Begins the reads of a batch; raises as `coldpress.runtime.flash.Reader.submit`."""
        for began in self._observers.began:
            began(purpose, batch)
        return self.flash.submit(batch.extents, into, landing)

    def ended(self, purpose: Purpose, batch: planner.ReadBatch, waited_s: float) -> None:
        """Tells observers that the reads of a batch have ended."""
        for ended in self._observers.ended:
            ended(purpose, batch.extents.offsets.size, batch.extents.num_bytes, waited_s)


def dense_batches(
    units: planner.Strided, num_units: int, room: int, page_bytes: int, gap_bytes: int, flash: Flash
) -> Iterator[planner.ReadBatch]:
    """Plans a pass over all units of a part: straight through, or skipping the other layers of its group, whichever
    takes the device less time.

    Args:
        units: Where the units lie.
        num_units: Number of units.
        room: Bytes that a batch may take.
        page_bytes: Size of a page.
        gap_bytes: Reads at most this far apart become one.
        flash: The device's law.
    """
    max_bytes = longest_read_bytes(room, units.unit_bytes, page_bytes)
    whole = planner.sequential_batches(units, num_units, page_bytes, room, max_bytes)
    if units.stride_bytes == units.unit_bytes:
        return whole
    apart = planner.plan_reads(units, np.arange(num_units), page_bytes, gap_bytes, max_bytes)
    if room < span_bytes(units.stride_bytes, page_bytes):
        return planner.batches(apart, room)  # no room for the bytes between two units
    length = units.stride_bytes * num_units
    around_s = flash_seconds(flash, len(apart.extents), apart.extents.num_bytes)
    through_s = flash_seconds(flash, -(-length // max_bytes), length)
    return whole if through_s <= around_s else planner.batches(apart, room)


def in_buffer(half: Half, offsets: np.ndarray, units: planner.Strided) -> np.ndarray:
    """Returns the units at ascending `offsets` of a half, uint8 [m, unit_bytes], as a view of the half.

    Units at regular offsets stay where they are. Other units are moved together at the half's front.
    """
    size, stride = units.unit_bytes, units.stride_bytes
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first == (offsets.size - 1) * stride:
        return half.rows[first : last + 1 : stride]
    rows = half.memory[: offsets.size * size].reshape(-1, size)
    step = max(1, COPY_BYTES // size)
    for start in range(0, offsets.size, step):  # ascending, so a unit only overwrites gaps and units already moved
        rows[start : start + step] = half.rows[offsets[start : start + step]]
    return rows
