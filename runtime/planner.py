"""Which reads bring a set of units from flash: pure arithmetic, shared by real and simulated runs.

Units lie packed, so a read starts and ends inside a page and is rounded out to pages. Reads that share or touch pages
become one, and so do reads with at most `gap_bytes` between them (access collapse as in Ripple 5.1, with one gap
throughout where Ripple adapts it at run time: fewer operations for a few bytes that nobody asked for). No read is
longer than `max_bytes`; where that cuts between two units of one page, both reads contain that page.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from runtime._extents import Extents, span_bytes


@dataclass(frozen=True)
class ReadPlan:
    """Reads, and where in them each unit lies. Units are in ascending order of their flash position."""

    extents: Extents
    unit_extent: np.ndarray
    """int64 [k], non-decreasing: the index of the read that holds the unit."""
    unit_offset: np.ndarray
    """int64 [k], bytes from that read's first byte to the unit's."""


@dataclass(frozen=True)
class Batch:
    """Consecutive reads of a plan that fit the read buffer together, and the units in them."""

    extents: Extents
    first_unit: int
    buffer_offset: np.ndarray
    """int64 [m], bytes from the start of the buffer to the units from `first_unit` on."""


def plan_reads(
    section_offset: int, unit_bytes: int, positions: np.ndarray, page_bytes: int, gap_bytes: int, max_bytes: int
) -> ReadPlan:
    """The reads for units at `positions` of a section.

    Args:
        section_offset: First byte of the section, a multiple of `page_bytes`.
        unit_bytes: Bytes of one unit.
        positions: Flash positions, integers [k], distinct and ascending.
        page_bytes: Size of a page.
        gap_bytes: Reads whose pages are at most this far apart become one.
        max_bytes: Longest read, at least `span_bytes` of a unit.
    """
    if max_bytes < span_bytes(unit_bytes, page_bytes):
        raise ValueError(f"max_bytes is {max_bytes}, one unit may need {span_bytes(unit_bytes, page_bytes)}")
    starts = section_offset + positions.astype(np.int64) * unit_bytes
    low = starts // page_bytes * page_bytes
    high = -(-(starts + unit_bytes) // page_bytes) * page_bytes
    opens = np.ones(starts.size, bool)
    opens[1:] = low[1:] - high[:-1] > gap_bytes
    _cut(opens, low, high, max_bytes)
    first = np.flatnonzero(opens)
    last = np.append(first[1:], starts.size)[: first.size] - 1
    unit_extent = np.cumsum(opens) - 1
    return ReadPlan(Extents(low[first], high[last] - low[first]), unit_extent, starts - low[first][unit_extent])


def _cut(opens: np.ndarray, low: np.ndarray, high: np.ndarray, max_bytes: int) -> None:
    """Opens further reads inside those that are too long, each as long as it may be."""
    first = np.flatnonzero(opens)
    stops = np.append(first[1:], opens.size)[: first.size]
    too_long = high[stops - 1] - low[first] > max_bytes
    for start, stop in zip(first[too_long].tolist(), stops[too_long].tolist(), strict=True):
        while high[stop - 1] - low[start] > max_bytes:
            start += int(np.searchsorted(high[start:stop], low[start] + max_bytes, side="right"))
            opens[start] = True


def batches(plan: ReadPlan, buffer_bytes: int) -> Iterator[Batch]:
    """Cuts a plan into groups of consecutive reads of at most `buffer_bytes`, each group as large as it may be."""
    lengths = plan.extents.lengths
    ends = np.cumsum(lengths)
    first = 0
    while first < lengths.size:
        read_before = int(ends[first] - lengths[first])
        stop = int(np.searchsorted(ends, read_before + buffer_bytes, side="right"))
        if stop == first:
            raise ValueError(f"buffer_bytes is {buffer_bytes}, one read has {int(lengths[first])}")
        extents = Extents(plan.extents.offsets[first:stop], lengths[first:stop])
        low, high = np.searchsorted(plan.unit_extent, (first, stop))
        buffer_offset = extents.buffer_offsets[plan.unit_extent[low:high] - first] + plan.unit_offset[low:high]
        yield Batch(extents, int(low), buffer_offset)
        first = stop


def sequential_batches(
    section_offset: int, unit_bytes: int, num_units: int, page_bytes: int, buffer_bytes: int, max_bytes: int
) -> Iterator[Batch]:
    """The whole section from front to back, as much at a time as fits the buffer, in reads of at most `max_bytes`.

    The units of a batch lie in the buffer one after another; `max_bytes` is a multiple of `page_bytes`.
    """
    room = (buffer_bytes - page_bytes) // unit_bytes  # a batch may begin up to a page after its first read does
    per_batch = max(1, room)
    for first in range(0, num_units, per_batch):
        start = section_offset + first * unit_bytes
        stop = section_offset + min(first + per_batch, num_units) * unit_bytes
        low, high = start // page_bytes * page_bytes, -(-stop // page_bytes) * page_bytes
        if high - low > buffer_bytes:
            raise ValueError(f"buffer_bytes is {buffer_bytes}, one unit may need {span_bytes(unit_bytes, page_bytes)}")
        offsets = np.arange(low, high, max_bytes, dtype=np.int64)
        lengths = np.minimum(max_bytes, high - offsets)
        num_read = (stop - start) // unit_bytes
        yield Batch(Extents(offsets, lengths), first, start - low + np.arange(num_read, dtype=np.int64) * unit_bytes)
