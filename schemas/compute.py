"""Figures of hardware, which name their sources; and those of a device's computing, where its profile says so.

Kernel rates are of stored bytes: a kernel that reads rows of 4 bits passes fewer bytes per second than one that reads
rows of 16 bits, and a few scattered rows pass slower than a whole matrix. runtime/store/computing.py turns the figures
into seconds.
"""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from coldpress.schemas.base import Many, Record
from coldpress.schemas.families import FormatName

T = TypeVar("T")
SECONDS, BYTES_PER_S = (0.0, 3600.0), (1.0, 1e15)
"""Least and largest values: wider than any device, and narrow enough that no sum of modelled seconds overflows."""
Overlap = Literal["none", "request", "all"]
"""Parts that run at once: none, so that reading and computing add up (LLM in a flash 3); a request's reads and its
computing, which is what the runtime does; or all of a token's reads and all of its computing."""


class Figure(Record, Generic[T]):
    """A value and its source: a paper's table, a measurement's command, or `assumption: <reason>`."""

    value: T
    source: str = Field(min_length=1)


def within(least: float, most: float) -> AfterValidator:
    """Returns the check of a field that its figure lies within bounds."""

    def check(figure: Figure[float], info: ValidationInfo) -> Figure[float]:
        if not least <= figure.value <= most:
            raise ValueError(f"{info.field_name} must be from {least:g} to {most:g}, found {figure.value:g}")
        return figure

    return AfterValidator(check)


Seconds = Annotated[Figure[float], within(*SECONDS)]
Rate = Annotated[Figure[float], within(*BYTES_PER_S)]


class KernelRate(Record):
    """Throughput of the product of a vector with stored rows, by all threads that decode."""

    format: FormatName
    density: float = Field(gt=0, le=1)
    """Share of the matrix's rows that are used; 1 for a dense product."""
    bytes_per_s: float = Field(ge=BYTES_PER_S[0], le=BYTES_PER_S[1])
    """Bytes of the rows that are used."""


class Compute(Record):
    """Figures of computing; each that is absent costs nothing, or DRAM bandwidth where it is a rate."""

    rates: Figure[Many[KernelRate]]
    """By format and ascending density. A format that is not among them is bound by DRAM bandwidth."""
    copy_bytes_per_s: Rate | None = None
    """Bytes of units that go from the read buffer to their slots (LLM in a flash's memory management)."""
    request_s: Seconds | None = None
    """Cost of a request for units beside its products and copies, if all its units are in DRAM."""
    reading_s: Seconds | None = None
    """Its further cost if it reads: planning, bookkeeping, evictions."""
    portion_s: Seconds | None = None
    """Further cost of each portion of its reads, from the wait for it to the next one."""
    layer_s: Seconds | None = None
    """Cost of a layer beside its products and requests: norms, attention over the context, calls."""
    token_s: Seconds | None = None
    """Cost of a token beside its layers."""
    further_share: Annotated[Figure[float], within(0, 1)] | None = None
    """Products of each further token of a pass, over those of its first: the tokens share the passing of weights."""

    @field_validator("rates")
    @classmethod
    def _check_rates(cls, rates: Figure[Many[KernelRate]]) -> Figure[Many[KernelRate]]:
        found = [(rate.format, rate.density) for rate in rates.value]
        if not found or found != sorted(set(found)):
            raise ValueError("rates must be sorted by format and density, each once, and at least one")
        return rates


def overlapped_seconds(overlap: Overlap, flash_s: float, computing_s: float, requests_s: float) -> float:
    """Returns the seconds of tokens under an assumption about what overlaps; `requests_s` are those where each
    request's reads and computing overlap."""
    found = {"none": flash_s + computing_s, "request": requests_s, "all": max(flash_s, computing_s)}
    return found[overlap]
