"""Counts what a store does, and computes the digest over all its reads."""

import hashlib
from dataclasses import dataclass, fields

from coldpress.runtime.store.facts import Observer, PreloadFacts, Purpose, RequestFacts, RowFacts
from coldpress.runtime.store.planner import ReadBatch

DECODING = (Purpose.REQUEST, Purpose.PRELOAD, Purpose.ROWS)


@dataclass
class Counters(Observer):
    """Counts reads and units by purpose: fields up to `preload_used_bytes` count requests and preloads, `prefill_`
    dense passes, `load_` pinned units. Fields that `RunMetrics` also has are copied to it under the same name."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    reads: int = 0
    read_bytes: int = 0
    used_bytes: int = 0
    active_bytes: int = 0
    kept_bytes: int = 0
    flash_s: float = 0.0
    preload_reads: int = 0
    preload_read_bytes: int = 0
    preloaded_bytes: int = 0
    preload_used_bytes: int = 0
    prefill_reads: int = 0
    prefill_read_bytes: int = 0
    prefill_flash_s: float = 0.0
    load_reads: int = 0
    load_read_bytes: int = 0

    def __post_init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def request(self, facts: RequestFacts) -> None:
        size = facts.unit_bytes
        self.hits += facts.num_hits
        self.active_bytes += facts.num_resident * size
        missing = facts.ids.size - facts.num_hits
        if missing:
            self.misses += missing
            self.evictions += facts.num_evicted
            self.used_bytes += (facts.num_read + facts.num_preloaded) * size
            self.active_bytes += (facts.num_read + facts.num_preloaded) * size
            self.preload_used_bytes += facts.num_preloaded * size
            self.kept_bytes += facts.num_stored * size

    def preloaded(self, facts: PreloadFacts) -> None:
        if facts.batch is not None:
            self.preload_reads += len(facts.batch.extents)
            self.preload_read_bytes += facts.batch.extents.num_bytes
            self.preloaded_bytes += facts.batch.buffer_offset.size * facts.unit_bytes

    def rows(self, facts: RowFacts) -> None:
        if facts.purpose in DECODING:
            self.used_bytes += facts.ids.size * facts.row_bytes

    def began(self, purpose: Purpose, batch: ReadBatch) -> None:
        self._sha256.update(batch.extents.offsets.astype("<i8").tobytes())
        self._sha256.update(batch.extents.lengths.astype("<i8").tobytes())
        if purpose in DECODING:
            self.reads += batch.extents.offsets.size
            self.read_bytes += batch.extents.num_bytes

    def ended(self, purpose: Purpose, num_reads: int, num_bytes: int, waited_s: float) -> None:
        if purpose in DECODING:
            self.flash_s += waited_s
        elif purpose is Purpose.STREAM:
            self.prefill_flash_s += waited_s
            self.prefill_reads += num_reads
            self.prefill_read_bytes += num_bytes
        else:
            self.load_reads += num_reads
            self.load_read_bytes += num_bytes

    def end_tokens(self, count: int, num_evicted: int) -> None:
        self.evictions += num_evicted

    def extents_sha256(self) -> str:
        """Returns the digest over offsets and lengths of all reads (int64, little-endian), in the order they began."""
        return self._sha256.hexdigest()

    def start(self) -> None:
        """Counts from zero again; the digest goes on."""
        for field in fields(self):
            setattr(self, field.name, field.default)
