"""LLM in a flash 2 and 3: a token's latency is I/O plus memory management plus computing; what a window loads.

The three are measured apart and added up (3, Table 3). I/O is bytes over the throughput of a read's size (2.2, 3.2).
Memory management copies what is new into the matrix of loaded neurons (3.3), and computing multiplies all that DRAM
holds, since the matrix is used as a whole.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.shared.papers.chunks import chunk_bytes_per_s
from coldpress.runtime.store.computing import copy_seconds, weight_seconds
from coldpress.schemas.compute import overlapped_seconds
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FormatName


@dataclass(frozen=True)
class Latency:
    """A token's seconds by part."""

    io_s: float
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """Returns the sum of the three (section 3): nothing overlaps."""
        computing_s = self.memory_s + self.compute_s
        return overlapped_seconds("none", self.io_s, computing_s, requests_s=max(self.io_s, computing_s))


def latency(
    device: DeviceProfile,
    format_name: FormatName,
    loaded_bytes: float,
    chunk_bytes: int,
    computed_bytes: float,
    *,
    manages_memory: bool = True,
) -> Latency:
    """Returns a token's latency (section 3).

    Args:
        device: Throughput by chunk size, rates of copying and computing.
        format_name: Format of the weights.
        loaded_bytes: Bytes that a token reads.
        chunk_bytes: Bytes of a read: a row, a bundled row and column (3.2), or a large sequential read.
        computed_bytes: Bytes that it multiplies.
        manages_memory: Whether what is read is copied into the matrix of loaded neurons (3.3).
    """
    io_s = loaded_bytes / chunk_bytes_per_s(device.flash, chunk_bytes)
    memory_s = copy_seconds(device, loaded_bytes) if manages_memory else 0.0
    return Latency(io_s, memory_s, weight_seconds(device, format_name, computed_bytes))


def aggregated_use(used: np.ndarray, window: int) -> float:
    """Returns s_agg(k): the mean share of neurons that at least one of k consecutive tokens uses (3.1, Figure 4a).

    Args:
        used: bool [T, num_units], T >= window.
        window: k, at least 1.
    """
    counts = np.cumsum(np.vstack([np.zeros(used.shape[1], np.int64), used]), axis=0)
    return float(np.mean(counts[window:] > counts[:-window]))


def incremental_use(used: np.ndarray, window: int) -> float:
    """Returns s_agg(k + 1) - s_agg(k): the mean share of neurons that a token loads with a window of k tokens (3.1)."""
    return aggregated_use(used, window + 1) - aggregated_use(used, window)
