"""What a store tells its observers: one record of each request, and of each group of reads.

The store decides and reads; whatever else wants to know of it observes it: counters, the digest over all reads, the
recorder of a trace, the gap that adapts, and the clock of a simulation. Observers change no decision of the request
that they are told of, so a real run and its simulation decide the same, and a run without a clock pays for none.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from coldpress.runtime.store.planner import ReadBatch, ReadPlan
from coldpress.schemas.families import FamilyName

Key = tuple[int, FamilyName]
"""A layer and a family: the key of everything that a store keeps."""


class Purpose(Enum):
    """Why the store reads."""

    REQUEST = "request"
    AHEAD = "ahead"
    STREAM = "stream"
    LOAD = "load"


class RequestFacts(NamedTuple):
    """What one request for units decided; complete before its first read begins."""

    key: Key
    ids: np.ndarray
    """int32 [k]: what was asked for."""
    may_stay: np.ndarray | None
    """int32, those of `ids` that the cache may keep; None for all."""
    unit_bytes: int
    num_hits: int
    """Of `ids`, those that were in DRAM."""
    num_resident: int
    """Units that are used from DRAM: the hits, and under `use_read_units` whatever else is there."""
    num_early: int
    """Of the missing units, those that were read ahead."""
    num_read: int
    """Units that are used from the request's own reads."""
    num_stored: int
    """Of those read or read ahead, the units that go to slots."""
    num_evicted: int
    plan: ReadPlan
    """The request's own reads."""
    room_bytes: int
    """What one batch of reads may take of the read buffer."""
    buffer_bytes: int
    """The read buffer."""

    @property
    def num_misses(self) -> int:
        """Of `ids`, those that were not in DRAM."""
        return self.ids.size - self.num_hits

    @property
    def wanted_bytes(self) -> int:
        """Bytes of the units that the reads were planned for."""
        return (self.num_misses - self.num_early) * self.unit_bytes

    @property
    def active_bytes(self) -> int:
        """Bytes of all units that the request uses."""
        return (self.num_resident + self.num_early + self.num_read) * self.unit_bytes


class AheadFacts(NamedTuple):
    """What one call for reading ahead decided."""

    key: Key
    ids: np.ndarray
    """int32 [k]: the guess."""
    unit_bytes: int
    batch: ReadBatch | None
    """The reads that were begun and their units; None where there is no room, or nothing is missing."""


class Observer:
    """Is told what a store does, as it does it; ignores everything that a subclass does not override."""

    def request(self, facts: RequestFacts) -> None:
        """A request was decided; its reads begin next."""

    def read_ahead(self, facts: AheadFacts) -> None:
        """Reading ahead was asked for."""

    def stream(self, key: Key) -> None:
        """A dense pass over all units of a part begins."""

    def began(self, purpose: Purpose, batch: ReadBatch) -> None:
        """The reads of a batch are about to begin."""

    def ended(self, purpose: Purpose, num_reads: int, num_bytes: int, waited_s: float) -> None:
        """Reads ended, after the run waited for them for so long."""

    def end_tokens(self, count: int, num_evicted: int) -> None:
        """The tokens that units were requested for are decoded; caches gave up so many units then."""

    def reset(self) -> None:
        """A new context begins."""


class Observers:
    """The observers of one store, by what they listen to: nobody is called to ignore a request."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        """Takes the methods that the observers' classes override."""
        self.request = [each.request for each in observers if type(each).request is not Observer.request]
        self.read_ahead = [each.read_ahead for each in observers if type(each).read_ahead is not Observer.read_ahead]
        self.stream = [each.stream for each in observers if type(each).stream is not Observer.stream]
        self.began = [each.began for each in observers if type(each).began is not Observer.began]
        self.ended = [each.ended for each in observers if type(each).ended is not Observer.ended]
        self.end_tokens = [each.end_tokens for each in observers if type(each).end_tokens is not Observer.end_tokens]
        self.reset = [each.reset for each in observers if type(each).reset is not Observer.reset]
