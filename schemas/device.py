"""A device profile: hardware figures, each with the source it was taken from, or the word `assumption`; and the one law
that says how long reads take on it (`flash_seconds`), which the simulator, `place`, `order` and every modelled speed
share.
"""

from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import Field, model_validator

from coldpress.schemas.base import Many, PositiveCount, Record

T = TypeVar("T")
SECONDS, BYTES_PER_S = (0.0, 3600.0), (1.0, 1e15)
"""Least and largest: wider than any device, and narrow enough that no sum of modelled seconds overflows."""


class Figure(Record, Generic[T]):
    """A value and where it comes from: a paper's table, a measurement's command, or `assumption: <reason>`."""

    value: T
    source: str = Field(min_length=1)


class ReadPoint(Record):
    """Read bandwidth reached with reads of one size, at the device's full queue depth."""

    read_bytes: PositiveCount
    bytes_per_s: float = Field(ge=BYTES_PER_S[0], le=BYTES_PER_S[1])


class Accelerator(Record):
    """An optional faster tier beside the CPU (PowerInfer's GPU)."""

    memory_bytes: Figure[PositiveCount]
    bytes_per_s: Figure[float]
    link_bytes_per_s: Figure[float]
    sync_s: Figure[float]
    """One synchronization with the CPU (PowerInfer Table 2, T_sync)."""

    @model_validator(mode="after")
    def _check(self) -> "Accelerator":
        _check_figure("bytes_per_s", self.bytes_per_s, BYTES_PER_S)
        _check_figure("link_bytes_per_s", self.link_bytes_per_s, BYTES_PER_S)
        _check_figure("sync_s", self.sync_s, SECONDS)
        return self


class Flash(Record):
    """The storage that units are read from."""

    page_bytes: Figure[PositiveCount]
    queue_depth: Figure[PositiveCount]
    latency_s: Figure[float]
    read_curve: Figure[Many[ReadPoint]]
    """Ascending read sizes; IOPS is bandwidth over size at the smallest, the peak is the largest bandwidth."""

    @model_validator(mode="after")
    def _check(self) -> "Flash":
        sizes = [point.read_bytes for point in self.read_curve.value]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"read_curve needs ascending, distinct read sizes, found {sizes}")
        page_bytes = self.page_bytes.value
        if page_bytes & (page_bytes - 1) or not 512 <= page_bytes <= 65536:
            raise ValueError(f"page_bytes must be a power of two from 512 to 65536, found {page_bytes}")
        _check_figure("latency_s", self.latency_s, SECONDS)
        return self

    @property
    def iops(self) -> float:
        """Reads per second that small reads reach."""
        first = self.read_curve.value[0]
        return first.bytes_per_s / first.read_bytes

    @property
    def bytes_per_s(self) -> float:
        """Peak read bandwidth."""
        return max(point.bytes_per_s for point in self.read_curve.value)

    @property
    def seconds_per_read(self) -> float:
        """What one more small read costs among many in flight."""
        return float(flash_seconds(self, self.queue_depth.value, 0)) / self.queue_depth.value

    @property
    def break_even_gap_bytes(self) -> int:
        """The gap that takes as long to read as one more read takes among many in flight."""
        return int(self.bytes_per_s * self.seconds_per_read)

    def issuing(self, num_reads: int) -> "Flash":
        """This flash under a runtime that keeps `num_reads` reads in flight, at most its own queue depth."""
        depth = min(num_reads, self.queue_depth.value)
        return self.model_copy(update={"queue_depth": self.queue_depth.model_copy(update={"value": depth})})


class DeviceProfile(Record):
    """Hardware that an artifact is compiled for."""

    name: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    title: str
    dram_bytes: Figure[PositiveCount]
    dram_budget_bytes: Figure[PositiveCount]
    dram_bytes_per_s: Figure[float]
    num_cores: Figure[PositiveCount]
    flash: Flash
    accelerator: Accelerator | None = None
    notes: str = ""

    @model_validator(mode="after")
    def _check(self) -> "DeviceProfile":
        _check_figure("dram_bytes_per_s", self.dram_bytes_per_s, BYTES_PER_S)
        return self


def _check_figure(name: str, figure: Figure[float], bounds: tuple[float, float]) -> None:
    least, most = bounds
    if not least <= figure.value <= most:
        raise ValueError(f"{name} must be from {least:g} to {most:g}, found {figure.value:g}")


def flash_seconds(flash: Flash, num_reads: Any, num_bytes: Any) -> Any:
    """The law: seconds of reads that are asked for together, the largest of three bounds.

    Operations per second, bandwidth, and latency: reads go out in waves as wide as the queue is deep, and each wave
    takes a first byte's time. It holds for one request: what is asked for later waits, so the time of a token is the
    sum over its requests, and not the law of their sum.

    Args:
        flash: The device's flash.
        num_reads: Reads, a whole number or an array of them.
        num_bytes: Bytes that they move, alike.

    Returns:
        Seconds, a float or float64 of the arrays' shape.
    """
    waves = -(-num_reads // flash.queue_depth.value)
    transferring = np.maximum(num_reads / flash.iops, num_bytes / flash.bytes_per_s)
    return np.maximum(transferring, waves * flash.latency_s.value)
