"""DIP 6.1 and A: throughput from the bytes that a token moves from flash and from DRAM.

Everything but the MLP is in DRAM; the rest of DRAM caches MLP weights. Reads have one bandwidth whatever their size and
no latency (a profile with pages of 512 bytes and latency 0). Nothing is computed: moving bytes takes all the time.
"""

import math
from dataclasses import dataclass

from coldpress.runtime.store.computing import weight_seconds
from coldpress.schemas.compute import Overlap, overlapped_seconds
from coldpress.schemas.device import DeviceProfile, flash_seconds


@dataclass(frozen=True)
class Moved:
    """Bytes that a token moves."""

    static_bytes: float
    """Weights that are always in DRAM and that every token uses, keys and values included."""
    mlp_bytes: float
    """All weights of the MLPs."""
    density: float = 1.0
    """Share of them that a token uses."""
    hit_rate: float = 0.0
    """Share of these that DRAM holds."""

    @property
    def flash_bytes(self) -> float:
        """Returns the bytes that come from flash."""
        return self.mlp_bytes * self.density * (1 - self.hit_rate)

    @property
    def dram_bytes(self) -> float:
        """Returns the bytes that pass from DRAM to the processor."""
        return self.static_bytes + self.mlp_bytes * self.density


def dense(model_bytes: float, static_bytes: float, dram_bytes: float) -> Moved:
    """Returns what a dense token moves: DRAM holds the same part of the MLPs for every token."""
    mlp_bytes = model_bytes - static_bytes
    return Moved(static_bytes, mlp_bytes, 1.0, min(1.0, max(0.0, dram_bytes - static_bytes) / mlp_bytes))


def tokens_per_s(device: DeviceProfile, moved: Moved, overlap: Overlap) -> float:
    """Returns the throughput (6.1). The paper's dense rows leave DRAM out (`all`: flash takes longer); its others fit a
    sum (`none`)."""
    page_bytes = device.flash.page_bytes.value
    num_reads = math.ceil(moved.flash_bytes / page_bytes)
    flash_s = float(flash_seconds(device.flash, num_reads, moved.flash_bytes))
    dram_s = weight_seconds(device, None, moved.dram_bytes)
    return 1 / overlapped_seconds(overlap, flash_s, dram_s, requests_s=max(flash_s, dram_s))
