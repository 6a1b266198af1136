"""What the store reads: a buffer full of reads at a time, and the units in the buffer. No decisions."""

from collections.abc import Callable, Iterator

import numpy as np

from runtime import planner
from runtime.flash import Ticket

COPY_BYTES = 1 << 20
"""Units are copied out of a read buffer this many bytes at a time."""


class Incoming:
    """The reads of one fetch: a buffer full of them under way, the others to follow."""

    def __init__(self, batches: Iterator[planner.Batch], begin: Callable[[planner.Batch], Ticket]) -> None:
        """Begins the first ones."""
        self._batches, self._begin = batches, begin
        self.begin_next()

    def begin_next(self) -> None:
        """To be called when nobody needs what the last ones brought any more."""
        batch = next(self._batches, None)
        self.under_way = None if batch is None else (batch, self._begin(batch))

    def abandon(self) -> None:
        """Returns when nothing is written to the buffer any more."""
        if self.under_way:
            self.under_way[1].abandon()


def in_buffer(buffer: np.ndarray, offsets: np.ndarray, units: planner.Strided) -> np.ndarray:
    """uint8 [m, unit_bytes]: the units at ascending `offsets` of a buffer, as a view of it."""
    size, stride = units.unit_bytes, units.stride_bytes
    windows = np.lib.stride_tricks.sliding_window_view(buffer, size)
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first == (offsets.size - 1) * stride:
        return windows[first : last + 1 : stride]
    rows = buffer[: offsets.size * size].reshape(-1, size)
    step = max(1, COPY_BYTES // size)
    for start in range(0, offsets.size, step):  # to the front, over bytes that are moved or nobody's
        rows[start : start + step] = windows[offsets[start : start + step]]
    return rows
