"""The memory of a family's slots, which goes back to the system, page by page, as it is given up.

Slots lie in a mapping of their own: what is freed of a heap may stay with the process. When a family gets another
number of slots its units move to another mapping, and what they leave is given back on the way, so that both together
take little more than the larger of the two.
"""

import mmap
from contextlib import suppress

import numpy as np

MOVED_BYTES = 64 << 10
"""Units are moved, and what they leave is given back, so many bytes at a time: little enough that the heap, which the
copies pass through, does not grow, and that they are still in a processor's cache when they are written."""
HUGE_FROM_BYTES = 4 << 20
"""Larger mappings ask for huge pages, as numpy's own arrays do."""


class SlotMemory:
    """Rows of one length; none of them takes memory until it is written to."""

    def __init__(self, num_slots: int, unit_bytes: int) -> None:
        """A mapping of `num_slots` rows."""
        self._map = mmap.mmap(-1, max(1, num_slots * unit_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if len(self._map) >= HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.rows = np.frombuffer(self._map, np.uint8, num_slots * unit_bytes).reshape(num_slots, unit_bytes)
        """uint8 [num_slots, unit_bytes]."""

    def give_back(self, first: int, stop: int) -> None:
        """Gives the pages back that lie whole in the rows from `first` to `stop`, whose contents are lost."""
        size, page = self.rows.shape[1], mmap.PAGESIZE
        low, high = -(-first * size // page) * page, stop * size // page * page
        if high > low:
            self._map.madvise(mmap.MADV_DONTNEED, low, high - low)


def moved(memory: SlotMemory, num_slots: int, old: np.ndarray, new: np.ndarray) -> SlotMemory:
    """Memory of `num_slots` rows in which row `new[i]` is what row `old[i]` was; nothing is left of `memory`.

    Args:
        memory: No row of it is used after this.
        num_slots: Of the result.
        old: int [m], distinct.
        new: int [m], distinct.
    """
    num_old, unit_bytes = memory.rows.shape
    found, order = SlotMemory(num_slots, unit_bytes), np.argsort(old)
    old, new = old[order], new[order]
    step = max(1, MOVED_BYTES // unit_bytes)
    for start in range(0, num_old, step):
        low, high = np.searchsorted(old, (start, start + step))
        found.rows[new[low:high]] = memory.rows[old[low:high]]
        memory.give_back(max(0, start - step), min(start + step, num_old))  # with the page on the edge
    return found


def copy_rows(source: np.ndarray, places: np.ndarray, target: np.ndarray, slots: np.ndarray) -> None:
    """Rows `places` of `source` to rows `slots` of `target`, uint8 [rows, unit_bytes] both; integers [m] both."""
    step = max(1, MOVED_BYTES // target.shape[1])
    for start in range(0, places.size, step):
        target[slots[start : start + step]] = source[places[start : start + step]]
