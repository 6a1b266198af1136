"""The read buffer: its halves, one filled while the other is used, and how long a read into them may be."""

from dataclasses import dataclass

import numpy as np

from coldpress.runtime.extents import span_bytes
from coldpress.runtime.store.slot_memory import SlotMemory

MAX_READ_BYTES = 512 << 10
"""Longest single read: devices reach peak bandwidth with less, and longer reads leave fewer to run in parallel."""
LEAST_HALF_BYTES = 128 << 10
"""Below this, the buffer is not halved: more batches would read more pages twice, for the units on both sides."""


def room_bytes(buffer_bytes: int, page_bytes: int, least_bytes: int) -> int:
    """Returns the bytes of a read buffer that one batch may take, so that `least_bytes` fit. It is half, so that the
    other half can be used meanwhile, or the whole buffer if half is too small."""
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
    """uint8 [size - unit_bytes + 1, unit_bytes], a view with overlapping rows: row i begins at byte i. So kernels can
    take a byte offset as a row number, and units in the buffer need no copy."""


def halves(buffer: np.ndarray, unit_bytes: int, page_bytes: int) -> list[Half]:
    """Divides a read buffer into parts of `room_bytes` for units of one size."""
    room = room_bytes(buffer.size, page_bytes, span_bytes(unit_bytes, page_bytes))
    parts = (buffer[start : start + room] for start in range(0, buffer.size - room + 1, room))
    return [Half(part, np.lib.stride_tricks.sliding_window_view(part, unit_bytes)) for part in parts]


@dataclass
class PoolMemory:
    """The memory of a family's units of one size: slots for cached units, and the read buffer."""

    slots: SlotMemory
    halves: list[Half]
    room_bytes: int
    """Bytes of the read buffer that one batch of reads may take."""
    longest_read_bytes: int
