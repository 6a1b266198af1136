"""Plans the reads that bring a set of units from flash: pure arithmetic, the same for real and simulated runs.

Units lie packed, or in a layer group a fixed stride apart, so a unit begins and ends inside a page and its read is
rounded out to pages. Reads that share or touch pages become one, and so do reads with at most `gap_bytes` between them:
access collapse as in Ripple 5.1, which reads a few unneeded bytes to save operations. The caller passes the gap, which
may change from request to request (runtime/store/gap.py). Reads longer than `max_bytes` are cut between two units that
share no page; if the second half has no such place, between two units of one page, which is then read twice. The loop
over units is in the native core (runtime/native/src/plan.cpp).
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.extents import Extents, span_bytes

ARRIVAL_BYTES = 1 << 20
"""Least bytes read between two portions of a batch: smaller portions cost more in calls than overlap saves."""
ENDLESS = 1 << 62
"""A `max_bytes` that cuts no read."""
MAX_READ_BYTES = 512 << 10
"""Longest single read: devices reach peak bandwidth with less, and longer reads leave fewer to run in parallel."""
LEAST_HALF_BYTES = 128 << 10
"""Below this, the buffer is not halved: more batches would read more pages twice, for the units on both sides."""


@dataclass(frozen=True)
class ReadPlan:
    """Reads, and where each unit lies in them. Units are in ascending order of flash position."""

    extents: Extents
    unit_extent: np.ndarray
    """int64 [k], non-decreasing: the index of the read that holds the unit."""
    unit_offset: np.ndarray
    """int64 [k], bytes from the read's first byte to the unit's first byte."""


NO_READS = ReadPlan(Extents(np.empty(0, np.int64), np.empty(0, np.int64)), np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class ReadBatch:
    """Consecutive reads of a plan that fit the read buffer together, and the units in them."""

    extents: Extents
    first_unit: int
    buffer_offset: np.ndarray
    """int64 [m], bytes from the start of the buffer to the units from `first_unit` on."""


@dataclass(frozen=True)
class Strided:
    """The places of one family's units in a layer: unit p is `unit_bytes` at `offset_bytes + p * stride_bytes`."""

    offset_bytes: int
    unit_bytes: int
    stride_bytes: int
    """At least `unit_bytes`; equal where units lie packed."""

    def starts(self, positions: np.ndarray) -> np.ndarray:
        """Returns the first byte of the units at `positions`, integers [k], as int64 [k]."""
        return self.offset_bytes + positions.astype(np.int64) * self.stride_bytes


def room_bytes(buffer_bytes: int, page_bytes: int, least_bytes: int) -> int:
    """Returns the bytes of a read buffer that one batch may take, so that `least_bytes` fit. It is half, so that the
    other half can be used meanwhile, or the whole buffer if half is too small."""
    half = buffer_bytes // 2 // page_bytes * page_bytes
    return half if half >= max(LEAST_HALF_BYTES, least_bytes) else buffer_bytes


def longest_read_bytes(room: int, unit_bytes: int, page_bytes: int) -> int:
    """Returns the longest single read if a batch has `room` bytes; a unit always fits."""
    return max(min(MAX_READ_BYTES, room), span_bytes(unit_bytes, page_bytes))


def plan_reads(units: Strided, positions: np.ndarray, page_bytes: int, gap_bytes: int, max_bytes: int) -> ReadPlan:
    """Plans the reads for units at `positions`, integers [k], distinct and ascending.

    Args:
        gap_bytes: Reads whose pages are at most this far apart become one.
        max_bytes: Longest read, at least `span_bytes` of a unit.

    Raises:
        ValueError: if a read of `max_bytes` may be too short for a unit.
    """
    if not positions.size:  # common when most units are in DRAM
        return NO_READS
    places = np.ascontiguousarray(positions, np.int64)
    sizes = page_bytes, gap_bytes, max_bytes
    reads = _native.plan_reads(places, units.offset_bytes, units.unit_bytes, units.stride_bytes, *sizes)
    offsets, lengths, unit_extent, unit_offset = reads
    return ReadPlan(Extents(offsets, lengths), unit_extent, unit_offset)


def count_reads(
    units: Strided, positions: np.ndarray, stops: np.ndarray, page_bytes: int, gaps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Counts the reads that `plan_reads` would plan for many requests under many gaps, however long a read gets.

    Args:
        positions: int64 [k], the positions of one request after another, ascending within each.
        stops: int64 [num_requests], where each request stops in `positions`.
        gaps: int64 [num_gaps], bytes.

    Returns:
        Reads and their bytes, int64 [num_requests, num_gaps].
    """
    place = units.offset_bytes, units.unit_bytes, units.stride_bytes
    reads, read_bytes = _native.count_reads(positions, stops, *place, page_bytes, gaps)
    shape = stops.size, gaps.size
    return reads.reshape(shape), read_bytes.reshape(shape)


def brought(units: Strided, num_units: int, extents: Extents) -> np.ndarray:
    """Returns the flash positions of all units entirely inside `extents`, int64, distinct and ascending."""
    first = -(-(extents.offsets - units.offset_bytes) // units.stride_bytes)
    last = (extents.offsets + extents.lengths - units.offset_bytes - units.unit_bytes) // units.stride_bytes
    first, stop = np.maximum(first, 0), np.minimum(last + 1, num_units)
    first[1:] = np.maximum(first[1:], stop[:-1])  # two reads may contain one page: count its units once
    counts = np.maximum(stop - first, 0)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + within


def inside(units: Strided, positions: np.ndarray, extents: Extents) -> ReadPlan:
    """Plans the same reads for units at ascending `positions`; each of them must lie entirely inside a read."""
    starts = units.starts(positions)
    unit_extent = np.searchsorted(extents.offsets + extents.lengths, starts + units.unit_bytes)
    return ReadPlan(extents, unit_extent, starts - extents.offsets[unit_extent])


def batches(plan: ReadPlan, buffer_bytes: int) -> list[ReadBatch]:
    """Cuts a plan into groups of consecutive reads of at most `buffer_bytes`, each as large as possible. Raises
    `ValueError` if a read is longer than `buffer_bytes`."""
    lengths = plan.extents.lengths
    if lengths.size and plan.extents.num_bytes <= buffer_bytes:  # fast path: holds for nearly every request
        return [ReadBatch(plan.extents, 0, plan.extents.buffer_offsets[plan.unit_extent] + plan.unit_offset)]
    found: list[ReadBatch] = []
    first = 0
    for stop in batch_stops(lengths, buffer_bytes):
        extents = Extents(plan.extents.offsets[first:stop], lengths[first:stop])
        low, high = plan.unit_extent.searchsorted((first, stop))
        buffer_offset = extents.buffer_offsets[plan.unit_extent[low:high] - first] + plan.unit_offset[low:high]
        found.append(ReadBatch(extents, int(low), buffer_offset))
        first = stop
    return found


def batch_stops(lengths: np.ndarray, buffer_bytes: int) -> list[int]:
    """Returns where each batch of `batches` stops: the number of its last read plus one, ascending. Raises `ValueError`
    if a read is longer than `buffer_bytes`."""
    ends: list[int] = lengths.cumsum().tolist()
    found: list[int] = []
    first = before = 0
    while first < len(ends):
        stop = bisect_right(ends, before + buffer_bytes, lo=first)
        if stop == first:
            raise ValueError(f"buffer_bytes is {buffer_bytes}, one read has {ends[first] - before}")
        found.append(stop)
        first, before = stop, ends[stop - 1]
    return found


def arrivals(batch: ReadBatch, unit_bytes: int, least_bytes: int) -> list[tuple[int, int, int]]:
    """Cuts a batch, whose reads arrive in order, into portions that can be used before the rest of the batch is read.

    Returns (first unit, stop, count) of each portion: these units of the batch are in memory when its first `count`
    reads are. At least `least_bytes` are read between two portions.
    """
    if batch.extents.num_bytes <= least_bytes:
        return [(0, batch.buffer_offset.size, batch.extents.offsets.size)] if batch.buffer_offset.size else []
    ends = np.cumsum(batch.extents.lengths)
    needed = np.searchsorted(ends, batch.buffer_offset + unit_bytes) + 1  # reads that must have landed for each unit
    parts: list[tuple[int, int, int]] = []
    first, read_bytes = 0, 0
    while first < needed.size:
        count = min(int(np.searchsorted(ends, read_bytes + least_bytes)) + 1, ends.size)
        stop = int(np.searchsorted(needed, count, side="right"))
        read_bytes = int(ends[count - 1])
        if stop > first:
            parts.append((first, stop, count))
        first = stop
    return parts


def num_portions(batch_bytes: Any) -> Any:
    """Returns in how many portions batches of so many bytes arrive, by `arrivals`; integers, or arrays of them."""
    return -(-batch_bytes // ARRIVAL_BYTES)


def sequential_batches(
    units: Strided, num_units: int, page_bytes: int, buffer_bytes: int, max_bytes: int
) -> Iterator[ReadBatch]:
    """Plans a pass over all units from front to back, bytes between them included, one buffer at a time.

    The units of a batch lie `stride_bytes` apart in the buffer; a read has at most `max_bytes`, whole pages. Raises
    `ValueError` if the buffer is too small for one unit.
    """
    stride, tail = units.stride_bytes, units.stride_bytes - units.unit_bytes
    room = (buffer_bytes - page_bytes + tail) // stride  # the first unit may begin up to a page behind the read's start
    per_batch = max(1, room)
    for first in range(0, num_units, per_batch):
        positions = np.arange(first, min(first + per_batch, num_units))
        extents, offsets = adjoining_reads(units, positions, page_bytes, tail, max_bytes)
        if extents.num_bytes > buffer_bytes:
            needed = span_bytes(units.unit_bytes, page_bytes)
            raise ValueError(f"buffer_bytes is {buffer_bytes}, one unit may need {needed}")
        yield ReadBatch(extents, first, offsets)


def adjoining_reads(
    units: Strided, positions: np.ndarray, page_bytes: int, gap_bytes: int, max_bytes: int
) -> tuple[Extents, np.ndarray]:
    """Plans reads that are used together, once all of them are in memory; arguments are as in `plan_reads`.

    There is at least one unit, and `max_bytes` are whole pages. No page is read twice, and a unit may lie across two
    reads, which adjoin in the buffer. Returns the reads, and int64 [k], bytes from the start of the buffer to each
    unit.
    """
    plan = plan_reads(units, positions, page_bytes, gap_bytes, ENDLESS)
    low, length = plan.extents.offsets, plan.extents.lengths
    counts = -(-length // max_bytes)
    number = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
    offsets = np.repeat(low, counts) + number * max_bytes
    lengths = np.minimum(max_bytes, np.repeat(low + length, counts) - offsets)
    return Extents(offsets, lengths), plan.extents.buffer_offsets[plan.unit_extent] + plan.unit_offset
