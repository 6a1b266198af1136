"""The memory of a store: the slots of each pool and the read buffer, within the budget of the plan in force.

A plan that holds all units budgets no read buffer. It loads them through the unused budget and the memory that a
decoded token will need later; afterwards it keeps room for one unit, in case a unit could not be loaded.
"""

from collections.abc import Mapping

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.plan.bookkeeping import token_bytes
from coldpress.runtime.plan.budget import holds_everything, used_bytes
from coldpress.runtime.plan.memory import check_fits, physical_bytes
from coldpress.runtime.store.reads import Half, PoolMemory, halves, longest_read_bytes, room_bytes
from coldpress.runtime.store.slot_memory import SlotMemory, moved
from coldpress.runtime.store.slots import Pool, num_slots
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest

MAX_BUFFER_BYTES = 1 << 30
"""Largest read buffer that is used, because offsets in it are 32-bit numbers."""


LOADING_BYTES = 16 << 20
"""Read buffer for loading a whole model, if the budget has the room: two halves of many long reads. The plan's own
buffer is no measure, since such a plan budgets none."""


class Memory:
    used_bytes: int
    """DRAM that the plan's parts take."""
    is_whole: bool
    """True if there are slots for all units."""

    def __init__(self, manifest: Manifest, plan: Plan, moves_data: bool) -> None:
        """Allocates the slots, and the read buffer at its size for loading.

        Without `moves_data` the slots stay empty, whatever this machine has: in a simulation.

        Raises:
            DoesNotFitError: as `take`.
        """
        self._manifest, self._moves_data, self._page_bytes = manifest, moves_data, manifest.flash.page_bytes
        self.take(plan)
        self._allocate()

    def check(self, plan: Plan) -> None:
        """Raises `DoesNotFitError` if the plan's parts exceed its budget, or this machine's memory."""
        memory_bytes = physical_bytes() if self._moves_data else plan.dram_budget_bytes
        check_fits(plan, used_bytes(self._manifest, plan), memory_bytes)

    def take(self, plan: Plan) -> None:
        """Puts a plan in force; `move` and `resize_buffer` follow.

        Raises:
            DoesNotFitError: as `check`; nothing has changed.
        """
        self.check(plan)
        self._plan, self.used_bytes = plan, used_bytes(self._manifest, plan)
        self.is_whole = holds_everything(plan, self._manifest.flash.sections)

    def renew(self, plan: Plan) -> None:
        """Frees all memory, and allocates that of another plan at its size for loading.

        Raises:
            DoesNotFitError: as `check`; nothing has changed.
        """
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
        """Reallocates the read buffer if its size changes."""
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
        parts = halves(self.buffer, unit_bytes, self._page_bytes)
        room = parts[0].memory.size
        return parts, room, longest_read_bytes(room, unit_bytes, self._page_bytes)

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
