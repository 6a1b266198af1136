"""Records of a store's work, for its observers: of each request, each call that preloads, and each pass's rows.

The store decides and reads. Everything else observes it: counters, the digest over all reads, the recorder of a trace,
the adaptive gap, and the clock of a simulation. No observer changes a decision of the request that it is told about, so
a real run and its simulation decide the same, and a run without a clock does not pay for one.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from coldpress.runtime.store.planner import NO_READS, ReadBatch, ReadPlan
from coldpress.schemas.families import FamilyName

Key = tuple[int, FamilyName]
"""A layer and a family: the key by which a store finds a part."""


class Purpose(Enum):
    REQUEST = "request"
    PRELOAD = "preload"
    STREAM = "stream"
    LOAD = "load"
    ROWS = "rows"
    """Reads of a matrix by row, for decoded tokens; a prompt's are part of STREAM."""


class RequestFacts(NamedTuple):
    """The decisions for one request; complete before its first read begins."""

    key: Key
    ids: np.ndarray
    """int32 [k]: the requested units."""
    may_stay: np.ndarray | None
    """int32, the units of `ids` that the cache may keep; None for all."""
    unit_bytes: int
    room_bytes: int
    """Bytes of the read buffer that one batch of reads may take."""
    buffer_bytes: int
    num_hits: int
    """Units of `ids` that were in DRAM."""
    num_resident: int
    """Units that are used from DRAM: the hits, and under `use_read_units` all other units in DRAM."""
    num_preloaded: int = 0
    """Missing units that were preloaded."""
    num_read: int = 0
    """Units that are used from the request's own reads."""
    num_stored: int = 0
    """Units, read now or preloaded, that go to slots."""
    num_evicted: int = 0
    plan: ReadPlan = NO_READS

    @property
    def num_misses(self) -> int:
        """Units of `ids` that were not in DRAM."""
        return self.ids.size - self.num_hits

    @property
    def wanted_bytes(self) -> int:
        """Bytes of the units that the reads were planned for."""
        return (self.num_misses - self.num_preloaded) * self.unit_bytes


class PreloadFacts(NamedTuple):
    key: Key
    ids: np.ndarray
    """int32 [k]: the guess."""
    unit_bytes: int
    batch: ReadBatch | None
    """The reads that were begun and their units; None if there is no room, or nothing is missing."""


class RowFacts(NamedTuple):
    purpose: Purpose
    ids: np.ndarray
    """int32 [k], distinct and ascending."""
    row_bytes: int


class Observer:
    """Follows what a store does; ignores every event whose method a subclass does not override."""

    def request(self, facts: RequestFacts) -> None:
        """A request was decided; its reads begin next."""

    def preloaded(self, facts: PreloadFacts) -> None:
        """Units were guessed; their reads, if any, have begun."""

    def stream(self, key: Key, ids: np.ndarray | None) -> None:
        """A dense pass begins over units of a part, int32 ascending, or over all units."""

    def rows(self, facts: RowFacts) -> None:
        """A pass needs rows; their reads are about to begin, or have begun."""

    def began(self, purpose: Purpose, batch: ReadBatch) -> None:
        """The reads of a batch are about to begin."""

    def ended(self, purpose: Purpose, num_reads: int, num_bytes: int, waited_s: float) -> None:
        """Reads ended; the run waited `waited_s` seconds for them."""

    def end_tokens(self, count: int, num_evicted: int) -> None:
        """`count` tokens are decoded; caches evicted `num_evicted` units at their end."""

    def reset(self) -> None:
        """A new context begins."""


class Observers:
    """The observers of one store, by event, so that no call is wasted on an observer that ignores the event."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.request = [each.request for each in observers if type(each).request is not Observer.request]
        self.preloaded = [each.preloaded for each in observers if type(each).preloaded is not Observer.preloaded]
        self.stream = [each.stream for each in observers if type(each).stream is not Observer.stream]
        self.rows = [each.rows for each in observers if type(each).rows is not Observer.rows]
        self.began = [each.began for each in observers if type(each).began is not Observer.began]
        self.ended = [each.ended for each in observers if type(each).ended is not Observer.ended]
        self.end_tokens = [each.end_tokens for each in observers if type(each).end_tokens is not Observer.end_tokens]
        self.reset = [each.reset for each in observers if type(each).reset is not Observer.reset]
