"""What the store reads: parts of a buffer full of reads, one after the other, and the units in them. No decisions."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coldpress.runtime.extents import Extents, span_bytes
from coldpress.runtime.flash import Landing, Ticket
from coldpress.runtime.store import planner
from coldpress.schemas.device import Flash, flash_seconds

COPY_BYTES = 1 << 20
"""Units are moved inside a read buffer this many bytes at a time."""
MAX_READ_BYTES = 512 << 10
"""Longest single read: devices reach their peak bandwidth before, and longer ones leave fewer to run side by side."""
LEAST_HALF_BYTES = 128 << 10
"""Smaller halves of a read buffer are not used apart: neighbours share a page, which is read for both."""


def room_bytes(buffer_bytes: int, page_bytes: int, least_bytes: int) -> int:
    """What of a read buffer is read into at a time, while the rest is used: half, or all where half is too little.

    Args:
        buffer_bytes: Whole pages.
        page_bytes: Size of a page.
        least_bytes: That must have room.
    """
    half = buffer_bytes // 2 // page_bytes * page_bytes
    return half if half >= max(LEAST_HALF_BYTES, least_bytes) else buffer_bytes


def _under_way_together(plan: planner.ReadPlan, buffer_bytes: int, room: int) -> Iterator[Extents]:
    """The reads of a plan in the portions that a device has before it at once: all, where `room` is half of the buffer,
    since then it is never idle in between, or else a buffer full at a time."""
    if room < buffer_bytes:
        yield plan.extents
    else:
        yield from (batch.extents for batch in planner.batches(plan, room))


def longest_read_bytes(room: int, unit_bytes: int, page_bytes: int) -> int:
    """What a single read of units may have, where `room` bytes are read into at a time; a unit always fits."""
    return max(min(MAX_READ_BYTES, room), span_bytes(unit_bytes, page_bytes))


def modelled_flash_s(flash: Flash, plan: planner.ReadPlan, buffer_bytes: int, room: int) -> float:
    """Seconds of a plan's reads by a device's law."""
    portions = _under_way_together(plan, buffer_bytes, room)
    return sum(float(flash_seconds(flash, len(reads), reads.num_bytes)) for reads in portions)


@dataclass(frozen=True)
class Half:
    """A part of the read buffer that is read into while another is used."""

    memory: np.ndarray
    """uint8 [size]."""
    rows: np.ndarray
    """uint8 [size - unit_bytes + 1, unit_bytes]: row i is what begins at byte i, as a view."""


def halves(buffer: np.ndarray, unit_bytes: int, page_bytes: int) -> list[Half]:
    """A read buffer's parts of `room_bytes`, for units of one size."""
    room = room_bytes(buffer.size, page_bytes, span_bytes(unit_bytes, page_bytes))
    parts = (buffer[start : start + room] for start in range(0, buffer.size - room + 1, room))
    return [Half(part, np.lib.stride_tricks.sliding_window_view(part, unit_bytes)) for part in parts]


class Begin(Protocol):
    """Has the reads of a batch begin."""

    def __call__(self, batch: planner.Batch, into: np.ndarray, landing: Landing) -> Ticket:
        """Begins them, and returns before they are done."""
        ...


@dataclass
class Brought:
    """What reads bring: units in their order, whether each is kept, and the slots of those that are."""

    planned: planner.ReadPlan
    units: np.ndarray
    """int32 [k]."""
    kept: np.ndarray
    """bool [k]."""
    slots: np.ndarray
    """int32 [k]; meaningless where a unit is not kept."""
    num_read: int = 0
    """So many of the units are in memory."""

    def batches(self, room: int) -> Iterator[planner.Batch]:
        """The reads, at most `room` bytes at a time."""
        return planner.batches(self.planned, room)

    def landing_in(self, rows: np.ndarray, begin: Begin) -> Callable[[planner.Batch, np.ndarray], Ticket]:
        """`begin` for batches whose kept units go to their slots in `rows`, uint8 [slots, unit_bytes]."""

        def begin_batch(batch: planner.Batch, buffer: np.ndarray) -> Ticket:
            its = slice(batch.first_unit, batch.first_unit + batch.buffer_offset.size)
            kept = self.kept[its]
            return begin(batch, buffer, Landing(batch.buffer_offset[kept], self.slots[its][kept], rows))

        return begin_batch


class Incoming:
    """Batches of reads in their order: as many under way as there are buffers, the others to follow."""

    def __init__(
        self,
        batches: Iterable[planner.Batch],
        halves: Sequence[Half],
        begin: Callable[[planner.Batch, np.ndarray], Ticket],
    ) -> None:
        """Begins the first ones."""
        self._batches, self._begin = iter(batches), begin
        self._under_way: deque[tuple[planner.Batch, Ticket, Half]] = deque()
        for half in halves:
            self._begin_next(half)

    def __iter__(self) -> Iterator[tuple[planner.Batch, Ticket, Half]]:
        """A batch, its reads, and where they go; which is read into again when the next one is asked for."""
        while self._under_way:
            yield self._under_way[0]
            self._begin_next(self._under_way.popleft()[2])

    def _begin_next(self, half: Half) -> None:
        batch = next(self._batches, None)
        if batch:
            self._under_way.append((batch, self._begin(batch, half.memory), half))

    def close(self) -> None:
        """Returns when nothing is written to a buffer any more."""
        for _, ticket, _ in self._under_way:
            ticket.abandon()


def dense_batches(
    units: planner.Strided, num_units: int, room: int, page_bytes: int, gap_bytes: int, flash: Flash
) -> Iterator[planner.Batch]:
    """A pass over all units of a part: from front to back, or around the other layers of its group, whichever takes
    the device less time.

    Args:
        units: Where they lie.
        num_units: How many there are.
        room: Bytes that are read into at a time.
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
        return planner.batches(apart, room)  # no room for what lies between
    length = units.stride_bytes * num_units
    around_s = flash_seconds(flash, len(apart.extents), apart.extents.num_bytes)
    through_s = flash_seconds(flash, -(-length // max_bytes), length)
    return whole if through_s <= around_s else planner.batches(apart, room)


def in_buffer(half: Half, offsets: np.ndarray, units: planner.Strided) -> np.ndarray:
    """uint8 [m, unit_bytes]: the units at ascending `offsets` of a half, as a view of it."""
    size, stride = units.unit_bytes, units.stride_bytes
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first == (offsets.size - 1) * stride:
        return half.rows[first : last + 1 : stride]
    rows = half.memory[: offsets.size * size].reshape(-1, size)
    step = max(1, COPY_BYTES // size)
    for start in range(0, offsets.size, step):  # to the front, over bytes that are moved or nobody's
        rows[start : start + step] = half.rows[offsets[start : start + step]]
    return rows
