"""The memory of a family's slots, which returns unused pages to the system at once.

Slots lie in a separate mapping, because memory freed on the heap may stay with the process. If the number of slots
changes, units move to a new mapping, and the old pages are returned during the move, so that both mappings together
never take much more than the larger one.
"""

import mmap
from contextlib import suppress

import numpy as np

MOVED_BYTES = 64 << 10
"""Bytes of units that are moved at a time. Copies pass through the heap: this few bytes do not make it grow, and are
still in the processor's cache when they are written."""


class SlotMemory:
    """Rows of one length; a row takes no memory until it is written to."""

    def __init__(self, num_slots: int, unit_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, num_slots * unit_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # threads that touch a new huge page at once each get one, so that a run exceeds its budget for a moment
            with suppress(OSError):  # the kernel may have none
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.rows = np.frombuffer(self._map, np.uint8, num_slots * unit_bytes).reshape(num_slots, unit_bytes)
        """uint8 [num_slots, unit_bytes]."""

    def give_back(self, first: int, stop: int) -> None:
        """Returns to the system the pages that lie entirely in rows `first` to `stop`; their contents are lost."""
        size, page = self.rows.shape[1], mmap.PAGESIZE
        low, high = -(-first * size // page) * page, stop * size // page * page
        if high > low:
            self._map.madvise(mmap.MADV_DONTNEED, low, high - low)


def moved(memory: SlotMemory, num_slots: int, old: np.ndarray, new: np.ndarray) -> SlotMemory:
    """Returns memory of `num_slots` rows whose row `new[i]` holds the former row `old[i]`, distinct; empties `memory`.
    `memory` must not be used afterwards."""
    num_old, unit_bytes = memory.rows.shape
    found, order = SlotMemory(num_slots, unit_bytes), np.argsort(old)
    old, new = old[order], new[order]
    step = max(1, MOVED_BYTES // unit_bytes)
    for start in range(0, num_old, step):
        low, high = np.searchsorted(old, (start, start + step))
        found.rows[new[low:high]] = memory.rows[old[low:high]]
        # from one step before, because the page on the edge of two steps only becomes free with the second one
        memory.give_back(max(0, start - step), min(start + step, num_old))
    return found


def copy_rows(source: np.ndarray, places: np.ndarray, target: np.ndarray, slots: np.ndarray) -> None:
    """Copies rows `places` of `source` to rows `slots` of `target`: uint8 [rows, unit_bytes], integers [m]."""
    step = max(1, MOVED_BYTES // target.shape[1])
    for start in range(0, places.size, step):
        target[slots[start : start + step]] = source[places[start : start + step]]
