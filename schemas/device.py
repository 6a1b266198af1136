"""A device profile: hardware figures, each with its source or the word `assumption`, and the law of its reads.

`flash_seconds` is the one law of how long reads take; the simulator, `place`, `order` and every modelled speed use it.
schemas/compute.py has the law of computing, and of how the two overlap.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationInfo, field_validator, model_validator

from coldpress.schemas.base import Many, PositiveCount, Record
from coldpress.schemas.compute import BYTES_PER_S, Compute, Figure, Rate, Seconds, within
from coldpress.schemas.law import Floats, Grid, Law, combined, fit, read_seconds

LATENCY_S = (0.0, 0.05)
"""Least and largest time to the first byte of a random read; a slow hard disk needs 0.02 s."""
SLACK = 1.1
"""Reads per second may exceed reads in flight over latency by this factor, since both are measured."""
NAME_PATTERN = r"^[a-z0-9]+(-[a-z0-9]+)*$"
MAX_NAME_CHARS = 64
"""A limit, since a device's name becomes part of names of folders and files."""


class ReadPoint(Record):
    """Read bandwidth with reads of one size, so many in flight: the device's queue depth where a point says nothing."""

    read_bytes: PositiveCount
    bytes_per_s: float = Field(ge=BYTES_PER_S[0], le=BYTES_PER_S[1])
    reads_in_flight: PositiveCount | None = None


class Accelerator(Record):
    """An optional faster tier beside the CPU (PowerInfer's GPU)."""

    memory_bytes: Figure[PositiveCount]
    bytes_per_s: Rate
    link_bytes_per_s: Rate
    sync_s: Seconds
    """One synchronization with the CPU (PowerInfer Table 2, T_sync)."""


def _law_of(values: dict[str, Any]) -> Law:
    return fit(_grid(values["read_curve"].value, values["queue_depth"].value), values["latency_s"].value).law


class Flash(Record):
    """The storage that holds the units, with measured points of its reads and the law that is fitted to them."""

    page_bytes: Figure[PositiveCount]
    queue_depth: Figure[PositiveCount]
    latency_s: Annotated[Figure[float], within(*LATENCY_S)]
    """Time of a read besides its operation and its bytes, however many are in flight: that to the first byte."""
    read_curve: Figure[Many[ReadPoint]]
    """Points by ascending read size, those of one size by ascending reads in flight."""
    law: Law = Field(default_factory=_law_of)
    """Fitted to the points and the latency where a profile does not have it."""

    @field_validator("page_bytes")
    @classmethod
    def _check_page(cls, page: Figure[int]) -> Figure[int]:
        if page.value & (page.value - 1) or not 512 <= page.value <= 65536:
            raise ValueError(f"page_bytes must be a power of two from 512 to 65536, found {page.value}")
        return page

    @field_validator("read_curve")
    @classmethod
    def _check_curve(cls, curve: Figure[Many[ReadPoint]]) -> Figure[Many[ReadPoint]]:
        sizes = [point.read_bytes for point in curve.value]
        places = [(point.read_bytes, point.reads_in_flight or 0) for point in curve.value]
        if not sizes or places != sorted(set(places)):
            found = _shown(places if any(depth for _, depth in places) else sizes)
            raise ValueError(f"read_curve needs ascending, distinct read sizes, found {found}")
        return curve

    @model_validator(mode="after")
    def _check_reads_in_flight(self) -> "Flash":
        """Refuses a rate that no device can reach: n reads in flight each take the latency (Little's law)."""
        grid, latency_s = self.grid, self.latency_s.value
        if grid.in_flight.max() > self.queue_depth.value:
            raise ValueError(
                f"read_curve has a point with {grid.in_flight.max():.0f} reads in flight, expected at most "
                f"queue_depth, {self.queue_depth.value}"
            )
        wanted = latency_s / grid.read_s
        worst = int(np.argmax(wanted / grid.in_flight))
        if wanted[worst] > SLACK * grid.in_flight[worst]:
            raise ValueError(
                f"read_curve has {1 / grid.read_s[worst]:.0f} reads of {grid.read_bytes[worst]:.0f} bytes a second, "
                f"but {grid.in_flight[worst]:.0f} in flight, each with a latency_s of {latency_s:g}, come "
                f"{grid.in_flight[worst] / latency_s:.0f} times a second; correct one of the three"
            )
        return self

    @property
    def grid(self) -> Grid:
        return _grid(self.read_curve.value, self.queue_depth.value)

    @property
    def law_errors(self) -> Floats:
        """Returns the law's relative error at each point of the read curve, float64 [n]."""
        grid = self.grid
        return read_seconds(self.law, self.latency_s.value, grid.read_bytes, grid.in_flight) / grid.read_s - 1

    @property
    def iops(self) -> float:
        """Returns the operations per second, without their bytes."""
        return self.law.reads_per_s

    @property
    def bytes_per_s(self) -> float:
        """Returns the bandwidth, without what operations take."""
        return self.law.bytes_per_s

    @property
    def break_even_gap_bytes(self) -> int:
        """Returns the gap that takes as long as one more read among many in flight, without bytes (Ripple 5.1)."""
        return int(self.bytes_per_s * float(read_seconds(self.law, self.latency_s.value, 0, self.queue_depth.value)))

    def issuing(self, num_reads: int) -> "Flash":
        """Returns this flash as seen by a runtime with `num_reads` reads in flight, at most the flash's queue depth."""
        depth = min(num_reads, self.queue_depth.value)
        return self.model_copy(update={"queue_depth": self.queue_depth.model_copy(update={"value": depth})})


UNCOMPUTED = "flash and DRAM bandwidth; this profile has no figure for computing"
"""Basis of a modelled speed for a device whose profile has no `compute`: it is an upper bound."""

OF_TOKENS = 0.2
"""Share by which modelled seconds of whole tokens were off on machines that were measured themselves
(docs/experiments/speed.md, `benchmarks.prediction`): a profile's points are of reads alone, and of products alone."""


class DeviceProfile(Record):
    """The hardware for which an artifact is compiled."""

    name: str = Field(pattern=NAME_PATTERN, max_length=MAX_NAME_CHARS)
    title: str
    dram_bytes: Figure[PositiveCount]
    dram_budget_bytes: Figure[PositiveCount]
    dram_bytes_per_s: Rate
    num_cores: Figure[PositiveCount]
    flash: Flash
    compute: Compute | None = None
    """None where nobody states it: then DRAM bandwidth bounds computing."""
    accelerator: Accelerator | None = None
    notes: str = ""

    @property
    def modelled_error(self) -> float:
        """Returns the share by which a modelled time may be off: that of whole tokens, and the law's median misfit on
        the profile's own points."""
        return OF_TOKENS + float(np.median(np.abs(self.flash.law_errors)))

    @field_validator("dram_budget_bytes")
    @classmethod
    def _check_budget(cls, budget: Figure[int], info: ValidationInfo) -> Figure[int]:
        dram = info.data.get("dram_bytes")
        if dram is not None and budget.value > dram.value:
            raise ValueError(f"dram_budget_bytes must be at most dram_bytes, {dram.value}, found {budget.value}")
        return budget


def _shown(sizes: Sequence[object]) -> str:
    return str(list(sizes)) if len(sizes) <= 8 else f"{list(sizes[:8])} and {len(sizes) - 8} more"


def _grid(curve: tuple[ReadPoint, ...], queue_depth: int) -> Grid:
    rows = [
        (point.read_bytes, point.reads_in_flight or queue_depth, point.read_bytes / point.bytes_per_s)
        for point in curve
    ]
    return Grid(*np.array(rows, np.float64).T)


def flash_seconds(flash: Flash, num_reads: Any, num_bytes: Any, in_flight: int | None = None) -> Any:
    """Returns the seconds of reads that are requested together: three bounds, as far as they overlap.

    The bounds are operations per second, bandwidth, and latency: reads go out in waves of `queue_depth` reads, and each
    wave takes the latency. The law's `overlap` says whether the largest counts, their sum, or a time between
    (coldpress/schemas/law.py). The law holds for one request: later requests wait, so that the time of a token is the
    sum over its requests, and not the law of their sum.

    A unit can be used as soon as its own read has ended. The first unit of a request waits for
    `flash_seconds(flash, 1, read_bytes)`: a read of many bundled units delays it, although it costs fewer operations.

    Args:
        num_reads: Number of reads, an integer or an array of integers.
        num_bytes: Bytes of these reads, a number or an array of the same shape.
        in_flight: The reads that are in flight at once, if fewer than the queue depth.

    Returns:
        Seconds, a float or float64 of the arrays' shape: never less for more reads or more bytes.
    """
    depth = flash.queue_depth.value if in_flight is None else min(in_flight, flash.queue_depth.value)
    waves = -(-num_reads // depth)
    bounds = (num_reads / flash.law.reads_per_s, waves * flash.latency_s.value, num_bytes / flash.law.bytes_per_s)
    return combined(bounds, flash.law.overlap)
