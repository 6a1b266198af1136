"""The memory of a store: the slots of each pool and the read buffer, within the budget of the plan in force.

Slots lie in a separate mapping, because memory freed on the heap may stay with the process. If the number of slots
changes, units move to a new mapping, and the old pages are returned during the move, so that both mappings together
never take much more than the larger one. One half of the read buffer is filled while the other is used.

A plan that holds all units budgets no read buffer. It loads them through the unused budget and the memory that a
decoded token will need later; afterwards it keeps room for one unit, in case a unit could not be loaded.
"""

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.dram.bookkeeping import token_bytes
from coldpress.runtime.dram.budget import holds_everything, used_bytes
from coldpress.runtime.dram.memory import physical_bytes
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.store.planner import longest_read_bytes, room_bytes
from coldpress.runtime.store.slots import Pool, num_slots
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import MANIFEST_FILE, Manifest

MAX_BUFFER_BYTES = 1 << 30
"""Largest read buffer that is used, because offsets in it are 32-bit numbers."""

LOADING_BYTES = 16 << 20
"""Read buffer for loading a whole model, if the budget has the room: two halves of many long reads. The plan's own
buffer is no measure, since such a plan budgets none."""
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


@dataclass(frozen=True)
class Half:
    """A part of the read buffer; one half is filled while the other is used."""

    memory: np.ndarray
    """uint8 [size]."""
    rows: np.ndarray
    """uint8 [size - unit_bytes + 1, unit_bytes], a view with overlapping rows: row i begins at byte i. So kernels can
    take a byte offset as a row number, and units in the buffer need no copy."""


@dataclass
class PoolMemory:
    """The memory of a family's units of one size: slots for cached units, and the read buffer."""

    slots: SlotMemory
    halves: list[Half]
    room_bytes: int
    """Bytes of the read buffer that one batch of reads may take."""
    longest_read_bytes: int


class Memory:
    used_bytes: int
    """DRAM that the plan's parts take."""
    is_whole: bool
    """True if there are slots for all units."""

    def __init__(self, manifest: Manifest, plan: Plan, moves_data: bool) -> None:
        """Allocates the slots, and the read buffer at its size for loading.

        Without `moves_data` the slots stay empty, whatever this machine has: in a simulation. Raises `DoesNotFitError`
        as `take`.
        """
        self._manifest, self._moves_data, self._page_bytes = manifest, moves_data, manifest.flash.page_bytes
        self.take(plan)
        self._allocate()

    def check(self, plan: Plan) -> None:
        """Raises `DoesNotFitError` if the plan's parts exceed its budget, or this machine's memory."""
        needed = used_bytes(self._manifest, plan)
        if needed > plan.dram_budget_bytes:
            raise DoesNotFitError(
                f"{MANIFEST_FILE}: {plan.title} needs {needed} bytes of DRAM, its budget is {plan.dram_budget_bytes}; "
                "take the plan from choose_plan"
            )
        if self._moves_data and needed > (available := physical_bytes()):
            raise DoesNotFitError(
                f"{plan.title} needs {needed:,} bytes of DRAM, this machine has {available:,} for this process; give a "
                "smaller --dram-budget"
            )

    def take(self, plan: Plan) -> None:
        """Puts a plan in force; `move` and `resize_buffer` follow. Raises `DoesNotFitError` as `check`; nothing has
        changed."""
        self.check(plan)
        self._plan, self.used_bytes = plan, used_bytes(self._manifest, plan)
        self.is_whole = holds_everything(plan, self._manifest.flash.sections)

    def renew(self, plan: Plan) -> None:
        """Frees all memory, and allocates that of another plan at its size for loading. Raises `DoesNotFitError` as
        `check`; nothing has changed."""
        self.take(plan)
        self.pools, self.buffer = {}, self.zeros(0)  # freed before the new memory exists
        self._allocate()

    def _allocate(self) -> None:
        self.buffer = self.zeros(self._buffer_bytes(loading=True))
        wanted = num_slots(self._plan, self._manifest.flash.sections)
        self.pools = {pool: PoolMemory(SlotMemory(wanted[pool], pool[1]), *self._read_into(pool[1])) for pool in wanted}

    def move(self, moves: Mapping[Pool, tuple[np.ndarray, np.ndarray]]) -> None:
        """Moves units from old slots to new ones: pool -> int [m] each (`coldpress.runtime.store.slots.resized`)."""
        wanted = num_slots(self._plan, self._manifest.flash.sections)
        growth = {pool: wanted[pool] - len(self.pools[pool].slots.rows) for pool in moves}
        # pools that shrink come first, so that pools that grow can use the memory they return
        for pool in sorted(moves, key=growth.__getitem__):
            old, new = moves[pool]
            memory = self.pools[pool]
            memory.slots = moved(memory.slots, wanted[pool], old, new)

    def resize_buffer(self, *, loading: bool) -> None:
        size_bytes = self._buffer_bytes(loading=loading)
        if self.buffer.size == size_bytes:
            return
        for memory in self.pools.values():  # drop all views: the old buffer is freed before the new one exists
            memory.halves = []
        self.buffer = self.zeros(0)
        self.buffer = self.zeros(size_bytes)
        for (_, unit_bytes), memory in self.pools.items():
            memory.halves, memory.room_bytes, memory.longest_read_bytes = self._read_into(unit_bytes)

    def zeros(self, size_bytes: int) -> np.ndarray:
        """Returns memory to read into, uint8 [size_bytes]; a simulation's takes no memory, since nothing is written."""
        return _native.aligned_buffer(size_bytes) if self._moves_data else np.zeros(size_bytes, np.uint8)

    def room_if_reading(self, unit_bytes: int) -> int:
        """Returns the bytes that one batch would have if the plan read anything."""
        return room_bytes(self.reading_bytes, self._page_bytes, span_bytes(unit_bytes, self._page_bytes))

    def _read_into(self, unit_bytes: int) -> tuple[list[Half], int, int]:
        """Returns the last three fields of `PoolMemory` for units of one size."""
        buffer, page_bytes = self.buffer, self._page_bytes
        room = room_bytes(buffer.size, page_bytes, span_bytes(unit_bytes, page_bytes))
        parts = (buffer[start : start + room] for start in range(0, buffer.size - room + 1, room))
        halves = [Half(part, np.lib.stride_tricks.sliding_window_view(part, unit_bytes)) for part in parts]
        return halves, room, longest_read_bytes(room, unit_bytes, page_bytes)

    @property
    def reading_bytes(self) -> int:
        # a request reads no page more than twice (native/src/plan.cpp), so a larger buffer would never fill
        return min(self._plan.read_buffer_bytes, 2 * self._manifest.flash.size_bytes, MAX_BUFFER_BYTES)

    def _buffer_bytes(self, *, loading: bool) -> int:
        if not self.is_whole:
            return self.reading_bytes
        page_bytes = self._page_bytes
        least = max(span_bytes(section.unit_bytes, page_bytes) for section in self._manifest.flash.sections)
        working_bytes = token_bytes(self._manifest.model, self._manifest.flash.sections)
        spare = working_bytes + self._plan.dram_budget_bytes - self.used_bytes
        most = min(max(self.reading_bytes, LOADING_BYTES), 2 * self._manifest.flash.size_bytes)
        return max(least, min(most, spare) // page_bytes * page_bytes) if loading else least
