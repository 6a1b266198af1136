"""What a store counts while it runs."""

from dataclasses import dataclass

from coldpress.runtime.plan.budget import whole_bytes
from coldpress.runtime.plan.memory import peak_rss_bytes
from coldpress.runtime.store.clock import computed_bytes, dram_seconds
from coldpress.runtime.store.planner import Batch
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import RunMetrics


@dataclass
class Counters:
    """What was read and why; from `hits` on over `fetch` and `preload`, from `prefill_reads` on over `stream` and
    opening."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    reads: int = 0
    read_bytes: int = 0
    used_bytes: int = 0
    active_bytes: int = 0
    kept_bytes: int = 0
    flash_s: float = 0.0
    modelled_flash_s: float = 0.0
    modelled_fetch_s: float = 0.0
    preload_reads: int = 0
    preload_read_bytes: int = 0
    preloaded_bytes: int = 0
    preload_used_bytes: int = 0
    prefill_reads: int = 0
    prefill_read_bytes: int = 0
    prefill_flash_s: float = 0.0
    load_reads: int = 0
    load_read_bytes: int = 0

    def use(self, unit_bytes: int, num_there: int, num_read: int, num_early: int, num_kept: int) -> int:
        """A request used so many units that were in DRAM, that it read, and that were read ahead; so many of the latter
        two stay. The bytes of all that it used."""
        self.used_bytes += (num_read + num_early) * unit_bytes
        self.preload_used_bytes += num_early * unit_bytes
        active_bytes = (num_there + num_read + num_early) * unit_bytes
        self.active_bytes += active_bytes
        self.kept_bytes += num_kept * unit_bytes
        return active_bytes

    def load(self, batch: Batch) -> None:
        """Reads of pinned units were made."""
        self.load_reads += len(batch.extents)
        self.load_read_bytes += batch.extents.num_bytes

    def stream(self, batch: Batch, flash_s: float) -> None:
        """Reads of the dense pass were made, and waited for."""
        self.prefill_flash_s += flash_s
        self.prefill_reads += len(batch.extents)
        self.prefill_read_bytes += batch.extents.num_bytes

    def preload(self, batch: Batch, unit_bytes: int) -> None:
        """Reads were made ahead."""
        self.preload_reads += len(batch.extents)
        self.preload_read_bytes += batch.extents.num_bytes
        self.preloaded_bytes += batch.buffer_offset.size * unit_bytes

    def as_metrics(
        self,
        manifest: Manifest,
        plan: Plan,
        *,
        num_tokens: int,
        num_passes: int,
        decode_s: float,
        prefill_s: float,
        first_token_s: float,
        dram_used_bytes: int,
        extents_sha256: str,
        direct_io: bool,
    ) -> RunMetrics:
        """A record of what was counted, with what only others know; tokens of a pass share the weights in DRAM."""
        device, computed = manifest.device, computed_bytes(manifest, plan)
        return RunMetrics(
            num_tokens=num_tokens,
            hits=self.hits,
            misses=self.misses,
            evictions=self.evictions,
            reads=self.reads,
            read_bytes=self.read_bytes,
            used_bytes=self.used_bytes,
            active_bytes=self.active_bytes,
            kept_bytes=self.kept_bytes,
            modelled_flash_s=self.modelled_flash_s,
            modelled_dram_s=dram_seconds(device, computed, num_passes, self.active_bytes, self.kept_bytes),
            modelled_s=self.modelled_fetch_s + dram_seconds(device, computed, num_passes),
            flash_s=self.flash_s,
            decode_s=decode_s,
            preload_reads=self.preload_reads,
            preload_read_bytes=self.preload_read_bytes,
            preloaded_bytes=self.preloaded_bytes,
            preload_used_bytes=self.preload_used_bytes,
            prefill_reads=self.prefill_reads,
            prefill_read_bytes=self.prefill_read_bytes,
            prefill_s=prefill_s,
            first_token_s=first_token_s,
            dram_budget_bytes=plan.dram_budget_bytes,
            dram_used_bytes=dram_used_bytes,
            whole_model_bytes=whole_bytes(manifest, plan),
            peak_rss_bytes=peak_rss_bytes(),
            extents_sha256=extents_sha256,
            direct_io=direct_io,
        )
