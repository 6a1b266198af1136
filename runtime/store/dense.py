"""The prefill's dense pass: all units of a part in flash order, as many at a time as the buffer or half of it holds."""

from collections.abc import Iterable, Iterator

import numpy as np

from coldpress.runtime.extents import span_bytes
from coldpress.runtime.store import planner
from coldpress.runtime.store.facts import Purpose
from coldpress.runtime.store.reads import Half, PoolMemory, longest_read_bytes
from coldpress.runtime.store.request import Device, Incoming
from coldpress.runtime.store.slots import Part
from coldpress.schemas.device import Flash, flash_seconds

COPY_BYTES = 1 << 20
"""Bytes of units that are moved at a time inside a read buffer."""


class DensePass:
    """All units of a part on their way into memory; iterate over it once."""

    def __init__(self, device: Device, part: Part, memory: PoolMemory, batches: Iterable[planner.ReadBatch]) -> None:
        """Begins the first reads of `batches`, which cover all units of the part."""
        self._part = part
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
                ticket.wait(len(batch.extents))
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


def dense_batches(
    units: planner.Strided, num_units: int, room: int, page_bytes: int, gap_bytes: int, flash: Flash
) -> Iterable[planner.ReadBatch]:
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
