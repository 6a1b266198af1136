"""The prefill's dense pass: all units of a part in flash order, or those of some experts, as many at a time as the
buffer or half of it holds.

A layer adds up one block of units after the other, so the bits of its sums depend on where blocks end. Without experts
a block is what a batch of reads brings. With experts it is as many units as one expert has, or as many of them as fit:
which other experts are read changes no block.
"""

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.extents import span_bytes
from coldpress.runtime.store import planner
from coldpress.runtime.store.memory import Half
from coldpress.runtime.store.planner import longest_read_bytes
from coldpress.runtime.store.request import Incoming
from coldpress.runtime.store.slots import Part
from coldpress.schemas.device import Flash, flash_seconds

COPY_BYTES = 1 << 20
"""Bytes of units that are moved at a time inside a read buffer."""


@dataclass(frozen=True)
class DenseBatch(planner.ReadBatch):
    """Reads that are used together; `first_unit` counts the units that the pass has read before."""

    positions: np.ndarray
    """int64 [m]: the units' flash positions, ascending."""
    stops: Sequence[int]
    """The end of each block of units among them."""

    def blocks(self) -> Iterator[slice]:
        return map(slice, (0, *self.stops), self.stops)


Blocks = Generator[tuple[np.ndarray, np.ndarray]]
"""Blocks of units: their ids, int32 [m], and rows, uint8 [m, unit_bytes]."""


def read_blocks(part: Part, incoming: Incoming[DenseBatch]) -> Blocks:
    """Yields blocks of units on their way into memory, as much as half of the read buffer holds, while reads fill the
    other half. A buffer that is not halved is filled when all its units have been used. The rows are views of the
    buffer; the next step overwrites them. Raises `CorruptPageError` if a page read is damaged."""
    try:
        for batch, ticket, half in incoming:
            ticket.wait(len(batch.extents))
            for block in batch.blocks():
                yield part.units_at(batch.positions[block]), in_buffer(half, batch.buffer_offset[block], part.units)
    finally:
        incoming.close()


def held_blocks(part: Part, rows: np.ndarray, batches: Iterable[DenseBatch]) -> Blocks:
    """Yields the blocks of `batches` from `rows`, uint8 [slots, unit_bytes], which hold all units. Pinned units lie in
    flash order in the slots, so most rows are views of them."""
    for batch in batches:
        for block in batch.blocks():
            positions = batch.positions[block]
            yield part.units_at(positions), rows[in_range(part.first_slot + positions)]


@dataclass(frozen=True)
class DensePlan:
    """Plans passes over a part: straight through, or around the other layers of its group, whichever takes the device
    less time."""

    units: planner.Strided
    num_units: int
    num_together: int
    """Units of an expert; all units where there are no experts."""
    room: int
    """Bytes that a batch may take."""
    page_bytes: int
    gap_bytes: int
    """Reads at most this far apart become one."""
    flash: Flash
    """The device's law."""

    def batches(self, positions: np.ndarray | None = None) -> Iterator[DenseBatch]:
        """Yields the batches of a pass over the units at `positions`, int64 ascending; None for all units."""
        around = self._around()
        if self.num_together < self.num_units or positions is not None:
            wanted = np.arange(self.num_units) if positions is None else positions
            yield from self._in_blocks(wanted, is_through=around is None)
            return
        place = self.units, self.num_units, self.page_bytes, self.room, self._max_bytes
        for batch in planner.sequential_batches(*place) if around is None else planner.batches(around, self.room):
            count = batch.buffer_offset.size
            within = np.arange(batch.first_unit, batch.first_unit + count)
            yield DenseBatch(batch.extents, batch.first_unit, batch.buffer_offset, within, (count,))

    @property
    def _max_bytes(self) -> int:
        return longest_read_bytes(self.room, self.units.unit_bytes, self.page_bytes)

    def _around(self) -> planner.ReadPlan | None:
        """Returns the reads of all units around those of other layers; None if they are read through."""
        units, page_bytes = self.units, self.page_bytes
        if units.stride_bytes == units.unit_bytes:
            return None
        apart = planner.plan_reads(units, np.arange(self.num_units), page_bytes, self.gap_bytes, self._max_bytes)
        if self.room < span_bytes(units.stride_bytes, page_bytes):
            return apart  # no room for the bytes between two units
        length = units.stride_bytes * self.num_units
        around_s = flash_seconds(self.flash, len(apart.extents), apart.extents.num_bytes)
        through_s = flash_seconds(self.flash, -(-length // self._max_bytes), length)
        return None if through_s <= around_s else apart

    def _in_blocks(self, positions: np.ndarray, is_through: bool) -> Iterator[DenseBatch]:
        """Yields batches of whole blocks, as many as surely fit."""
        span = span_bytes(self.units.unit_bytes, self.page_bytes)
        places = np.searchsorted(positions, self._edges(is_through)).tolist()
        first, stops, num_bytes = 0, list[int](), 0
        for start, stop in itertools.pairwise(places):
            if start == stop:
                continue
            low, high = self.units.starts(positions[[start, stop - 1]]).tolist()
            pages = -(-(high + self.units.unit_bytes) // self.page_bytes) - low // self.page_bytes
            needed = min(pages * self.page_bytes, (stop - start) * span)
            if stops and num_bytes + needed > self.room:
                yield self._batch(positions[first : stops[-1]], first, stops, is_through)
                first, stops, num_bytes = start, [], 0
            stops.append(stop)
            num_bytes += needed
        if stops:
            yield self._batch(positions[first : stops[-1]], first, stops, is_through)

    def _edges(self, is_through: bool) -> np.ndarray:
        """Returns the flash positions where blocks begin, and the end of the last; a block is an expert's units, or an
        equal part of them that fits."""
        stride, tail = self.units.stride_bytes, self.units.stride_bytes - self.units.unit_bytes
        fitting = self.room // span_bytes(self.units.unit_bytes, self.page_bytes)
        if is_through:
            fitting = (self.room - self.page_bytes + tail) // stride
        num_parts = -(-self.num_together // max(1, fitting))
        parts = np.arange(0, self.num_together, -(-self.num_together // num_parts))
        experts = np.arange(0, self.num_units, self.num_together)
        return np.append(experts[:, None] + parts, self.num_units)

    def _batch(self, positions: np.ndarray, first: int, stops: list[int], is_through: bool) -> DenseBatch:
        """Plans the reads of a batch; they leave out whole experts that nobody wants, and fit if units are close."""
        stride = self.units.stride_bytes
        gap_bytes = max(self.gap_bytes, stride - self.units.unit_bytes) if is_through else self.gap_bytes
        gap_bytes = min(gap_bytes, max(0, self.num_together * stride - 2 * self.page_bytes))
        place = self.units, positions, self.page_bytes
        extents, offsets = planner.adjoining_reads(*place, gap_bytes, self._max_bytes)
        if extents.num_bytes > self.room:
            extents, offsets = planner.adjoining_reads(*place, 0, self._max_bytes)
        return DenseBatch(extents, first, offsets, positions, [stop - first for stop in stops])


def in_buffer(half: Half, offsets: np.ndarray, units: planner.Strided) -> np.ndarray:
    """Returns the units at ascending `offsets` of a half, uint8 [m, unit_bytes], as a view of the half. Units at
    regular offsets stay where they are. Other units are moved together, to where the first one lies."""
    size, stride = units.unit_bytes, units.stride_bytes
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first == (offsets.size - 1) * stride:
        return half.rows[first : last + 1 : stride]
    rows = half.memory[first : first + offsets.size * size].reshape(-1, size)
    step = max(1, COPY_BYTES // size)
    for start in range(0, offsets.size, step):  # ascending, so a unit only overwrites gaps and units already moved
        rows[start : start + step] = half.rows[offsets[start : start + step]]
    return rows


def in_range(numbers: np.ndarray) -> np.ndarray | slice:
    """Returns ascending integers as a slice if none is left out, since a slice of an array is no copy."""
    first, stop = int(numbers[0]), int(numbers[-1]) + 1
    return slice(first, stop) if stop - first == numbers.size else numbers
