"""Counts what a store does, and computes the digest over all its reads."""

import hashlib
from dataclasses import asdict, dataclass, fields
from typing import Any

from coldpress.runtime.plan.budget import whole_bytes
from coldpress.runtime.plan.memory import peak_rss_bytes
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.facts import AheadFacts, Observer, Purpose, RequestFacts, RowFacts
from coldpress.runtime.store.planner import ReadBatch
from coldpress.runtime.store.resident import row_seconds, token_seconds
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import RunMetrics

DECODING = (Purpose.REQUEST, Purpose.AHEAD, Purpose.ROWS)


@dataclass
class Counters(Observer):
    """Counts reads and units by purpose: fields up to `preload_used_bytes` count requests and reads ahead, `prefill_`
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
            self.used_bytes += (facts.num_read + facts.num_early) * size
            self.active_bytes += (facts.num_read + facts.num_early) * size
            self.preload_used_bytes += facts.num_early * size
            self.kept_bytes += facts.num_stored * size

    def read_ahead(self, facts: AheadFacts) -> None:
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

    def as_metrics(
        self,
        manifest: Manifest,
        plan: Plan,
        clock: Clock | None,
        *,
        num_tokens: int,
        num_passes: int,
        decode_s: float,
        prefill_s: float,
        first_token_s: float,
        dram_used_bytes: int,
        direct_io: bool,
    ) -> RunMetrics:
        """Returns the counters as a record, with the caller's times and sizes. Computing counts passes, not tokens,
        because the tokens of one pass share the weights in DRAM."""
        besides_s = num_passes * token_seconds(manifest, plan)
        modelled: dict[str, Any] = (
            {}
            if clock is None
            else {
                "modelled_flash_s": clock.flash_s + num_passes * row_seconds(manifest, plan),
                "modelled_dram_s": clock.work_s + besides_s,
                "modelled_s": clock.fetch_s + besides_s,
            }
        )
        counted: dict[str, Any] = {
            name: value for name, value in asdict(self).items() if name in RunMetrics.model_fields
        }
        return RunMetrics(
            **counted,
            **modelled,
            num_tokens=num_tokens,
            decode_s=decode_s,
            prefill_s=prefill_s,
            first_token_s=first_token_s,
            dram_budget_bytes=plan.dram_budget_bytes,
            dram_used_bytes=dram_used_bytes,
            whole_model_bytes=whole_bytes(manifest, plan),
            peak_rss_bytes=peak_rss_bytes(),
            extents_sha256=self.extents_sha256(),
            direct_io=direct_io,
        )
