"""A device profile: hardware figures, each with its source or the word `assumption`, and the law of its reads.

`flash_seconds` is the one law of how long reads take; the simulator, `place`, `order` and every modelled speed use it.
schemas/compute.py has the law of computing, and of how the two overlap.
"""

from typing import Any

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from coldpress.schemas.base import Many, PositiveCount, Record
from coldpress.schemas.compute import Compute
from coldpress.schemas.figure import BYTES_PER_S, SECONDS, Figure, check_figure

LATENCY_S = (0.0, 0.05)
"""Least and largest time to the first byte of a random read; a slow hard disk needs 0.02 s."""
NAME_PATTERN = r"^[a-z0-9]+(-[a-z0-9]+)*$"
MAX_NAME_CHARS = 64
"""A limit, since a device's name becomes part of names of folders and files."""


class ReadPoint(Record):
    """Read bandwidth with reads of one size; the figure's source says how many reads are in flight."""

    read_bytes: PositiveCount
    bytes_per_s: float = Field(ge=BYTES_PER_S[0], le=BYTES_PER_S[1])


class Accelerator(Record):
    """An optional faster tier beside the CPU (PowerInfer's GPU)."""

    memory_bytes: Figure[PositiveCount]
    bytes_per_s: Figure[float]
    link_bytes_per_s: Figure[float]
    sync_s: Figure[float]
    """One synchronization with the CPU (PowerInfer Table 2, T_sync)."""

    @field_validator("bytes_per_s", "link_bytes_per_s", "sync_s")
    @classmethod
    def _check(cls, figure: Figure[float], info: ValidationInfo) -> Figure[float]:
        name = info.field_name or ""
        return check_figure(name, figure, SECONDS if name == "sync_s" else BYTES_PER_S)


class Flash(Record):
    """The storage that holds the units."""

    page_bytes: Figure[PositiveCount]
    queue_depth: Figure[PositiveCount]
    latency_s: Figure[float]
    read_curve: Figure[Many[ReadPoint]]
    """Points by ascending read size; IOPS is bandwidth over size at the first, the peak is the largest bandwidth."""

    @field_validator("page_bytes")
    @classmethod
    def _check_page(cls, page: Figure[int]) -> Figure[int]:
        if page.value & (page.value - 1) or not 512 <= page.value <= 65536:
            raise ValueError(f"page_bytes must be a power of two from 512 to 65536, found {page.value}")
        return page

    @field_validator("latency_s")
    @classmethod
    def _check_latency(cls, latency: Figure[float]) -> Figure[float]:
        return check_figure("latency_s", latency, LATENCY_S)

    @field_validator("read_curve")
    @classmethod
    def _check_curve(cls, curve: Figure[Many[ReadPoint]]) -> Figure[Many[ReadPoint]]:
        sizes = [point.read_bytes for point in curve.value]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"read_curve needs ascending, distinct read sizes, found {_shown(sizes)}")
        return curve

    @property
    def iops(self) -> float:
        """Returns the reads per second of small reads."""
        first = self.read_curve.value[0]
        return first.bytes_per_s / first.read_bytes

    @property
    def bytes_per_s(self) -> float:
        """Returns the peak read bandwidth."""
        return max(point.bytes_per_s for point in self.read_curve.value)

    @property
    def seconds_per_read(self) -> float:
        """Returns the seconds of one more small read among many in flight."""
        return float(flash_seconds(self, self.queue_depth.value, 0)) / self.queue_depth.value

    @property
    def break_even_gap_bytes(self) -> int:
        """Returns the gap whose bytes take as long as one more read among many in flight."""
        return int(self.bytes_per_s * self.seconds_per_read)

    def issuing(self, num_reads: int) -> "Flash":
        """Returns this flash as seen by a runtime with `num_reads` reads in flight, at most the flash's queue depth."""
        depth = min(num_reads, self.queue_depth.value)
        return self.model_copy(update={"queue_depth": self.queue_depth.model_copy(update={"value": depth})})


class DeviceProfile(Record):
    """The hardware for which an artifact is compiled."""

    name: str = Field(pattern=NAME_PATTERN, max_length=MAX_NAME_CHARS)
    title: str
    dram_bytes: Figure[PositiveCount]
    dram_budget_bytes: Figure[PositiveCount]
    dram_bytes_per_s: Figure[float]
    num_cores: Figure[PositiveCount]
    flash: Flash
    compute: Compute | None = None
    """None where nobody states it: then DRAM bandwidth bounds computing."""
    accelerator: Accelerator | None = None
    notes: str = ""

    @field_validator("dram_bytes_per_s")
    @classmethod
    def _check_rate(cls, figure: Figure[float]) -> Figure[float]:
        return check_figure("dram_bytes_per_s", figure, BYTES_PER_S)

    @field_validator("dram_budget_bytes")
    @classmethod
    def _check_budget(cls, budget: Figure[int], info: ValidationInfo) -> Figure[int]:
        dram = info.data.get("dram_bytes")
        if dram is not None and budget.value > dram.value:
            raise ValueError(f"dram_budget_bytes must be at most dram_bytes, {dram.value}, found {budget.value}")
        return budget


def _shown(sizes: list[int]) -> str:
    """Formats the first sizes of a curve for an error."""
    return str(sizes) if len(sizes) <= 8 else f"{sizes[:8]} and {len(sizes) - 8} more"


def flash_seconds(flash: Flash, num_reads: Any, num_bytes: Any) -> Any:
    """Returns the seconds of reads that are requested together: the largest of three bounds.

    The bounds are operations per second, bandwidth, and latency: reads go out in waves of `queue_depth` reads, and each
    wave takes the latency. The law holds for one request: later requests wait, so that the time of a token is the sum
    over its requests, and not the law of their sum.

    Args:
        flash: The device's flash.
        num_reads: Number of reads, an integer or an array of integers.
        num_bytes: Bytes of these reads, a number or an array of the same shape.

    Returns:
        Seconds, a float or float64 of the arrays' shape.
    """
    waves = -(-num_reads // flash.queue_depth.value)
    transferring = np.maximum(num_reads / flash.iops, num_bytes / flash.bytes_per_s)
    return np.maximum(transferring, waves * flash.latency_s.value)
