"""Reads a matrix on flash row by row, since a token needs one row: the token embeddings.

A pass reads the distinct rows of its tokens together, and can ask for them before it begins. Where the plan has room
for the whole matrix, it is loaded once, and no row is read afterwards.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from coldpress.runtime.extents import Extents, span_bytes
from coldpress.runtime.flash import Ticket
from coldpress.runtime.store import planner
from coldpress.runtime.store.facts import Purpose, RowFacts
from coldpress.runtime.store.planner import MAX_READ_BYTES
from coldpress.runtime.store.request import Device
from coldpress.schemas.layout import RowTable


class _Begun(NamedTuple):
    ids: np.ndarray
    """int32 [k], distinct and ascending."""
    batch: planner.ReadBatch
    memory: np.ndarray
    ticket: Ticket


class Rows:
    def __init__(self, table: RowTable, page_bytes: int, zeros: Callable[[int], np.ndarray]) -> None:
        """Allocates the buffer of one row; `zeros` gives memory to read into, uint8 [size]."""
        self._table, self._page_bytes, self._zeros = table, page_bytes, zeros
        self._places = planner.Strided(table.offset_bytes, table.row_bytes, table.row_bytes)
        self._buffer = zeros(span_bytes(table.row_bytes, page_bytes))
        self._begun: _Begun | None = None
        self._held: np.ndarray | None = None

    def begin(self, device: Device, tokens: np.ndarray) -> None:
        """Begins to read the rows `tokens`, int [T], for the next call of `take`, unless the matrix is in memory."""
        if self._held is not None:
            return
        self.drop()
        ids = np.unique(tokens).astype(np.int32)
        plan = planner.plan_reads(self._places, ids, self._page_bytes, 0, max(MAX_READ_BYTES, self._buffer.size))
        (batch,) = planner.batches(plan, plan.extents.num_bytes)
        one = plan.extents.num_bytes <= self._buffer.size
        memory = self._buffer if one else self._zeros(plan.extents.num_bytes)
        self._begun = _Begun(ids, batch, memory, device.flash.submit(batch.extents, memory))

    def take(self, device: Device, purpose: Purpose, tokens: np.ndarray) -> np.ndarray:
        """Returns the stored rows `tokens`, int [T], as uint8 [T, row_bytes]. Observers are told of the reads now.
        Raises `CorruptPageError` or `DeviceError` as `coldpress.runtime.flash.Ticket`."""
        if self._held is not None:
            return self._held[tokens]
        ids, places = np.unique(tokens, return_inverse=True)
        if self._begun is None or not np.array_equal(self._begun.ids, ids):
            self.begin(device, ids)
        assert self._begun is not None
        begun, extents = self._begun, self._begun.batch.extents
        facts = RowFacts(purpose, begun.ids, self._table.row_bytes)
        for rows in device.observers.rows:
            rows(facts)
        for began in device.observers.began:
            began(purpose, begun.batch)
        try:
            waited_s = begun.ticket.finish()
        except BaseException:
            self.drop()
            raise
        self._begun = None
        for ended in device.observers.ended:
            ended(purpose, len(extents), extents.num_bytes, waited_s)
        within = begun.batch.buffer_offset[:, None] + np.arange(self._table.row_bytes)
        return begun.memory[within][places]

    def drop(self) -> None:
        """Gives up rows that nobody took; afterwards no read writes to the buffer."""
        if self._begun is not None:
            self._begun.ticket.abandon()
            self._begun = None

    def load(self, device: Device) -> None:
        """Reads the whole matrix, unless it is in memory. Raises as `take`; then rows are read as before."""
        if self._held is not None:
            return
        self.drop()
        table = self._table
        size = -(-table.length_bytes // self._page_bytes) * self._page_bytes
        memory, starts = self._zeros(size), np.arange(0, size, MAX_READ_BYTES)
        extents = Extents(table.offset_bytes + starts, np.minimum(MAX_READ_BYTES, size - starts))
        ticket = device.begin(Purpose.LOAD, planner.ReadBatch(extents, 0, np.zeros(0, np.int64)), memory)
        try:
            waited_s = ticket.finish()
        except BaseException:
            ticket.abandon()
            raise
        for ended in device.observers.ended:
            ended(Purpose.LOAD, len(extents), size, waited_s)
        self._held = memory[: table.length_bytes].reshape(table.num_rows, table.row_bytes)

    def release(self) -> None:
        self._held = None
