"""Counts the reads of decoded tokens by length: long reads are what bundling, ordering and joining are for."""

from collections import Counter

from coldpress.runtime.store.counters import DECODING
from coldpress.runtime.store.facts import Observer, Purpose
from coldpress.runtime.store.planner import ReadBatch
from coldpress.schemas.metrics import ReadLength


class ReadLengths(Observer):
    """Counts reads, of requests and ahead, as a store begins them."""

    def __init__(self) -> None:
        self._counts = Counter[int]()

    def began(self, purpose: Purpose, batch: ReadBatch) -> None:
        if purpose in DECODING:
            self._counts.update(batch.extents.lengths.tolist())

    def found(self) -> tuple[ReadLength, ...]:
        """Returns the reads so far, the shortest first."""
        reads, read_bytes = Counter[int](), Counter[int]()
        for length, count in self._counts.items():
            least = 1 << (length.bit_length() - 1)
            reads[least] += count
            read_bytes[least] += count * length
        return tuple(
            ReadLength(least_bytes=least, reads=reads[least], read_bytes=read_bytes[least]) for least in sorted(reads)
        )
