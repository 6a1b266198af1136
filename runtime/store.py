"""Ids in, rows in memory out: cache, planner and flash under one DRAM budget. The runtime's one stateful class.

`fetch` is the path of a decoded token: cache lookup, read plan, device reads, admission and eviction, copies into
slots. Reads are under way before the first units are handed out, and what has arrived is computed with while the rest
is read. `stream` is the prefill's dense pass. The units of a family lie in one array for all layers, `rows(family)`:
first each layer's slots (pinned, then cached), then staging slots shared by all layers for units that are used but not
kept. A unit stays in its slot as long as it is cached: kernels take slot numbers, so rows need not be moved together
as in LLM-in-a-flash 3.3, and an evicted unit's slot is simply the next one to be filled.
"""

import hashlib
import os
import resource
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from runtime import _native, _plugins, planner
from runtime._counters import Counters
from runtime._extents import span_bytes
from runtime._incoming import COPY_BYTES, Incoming, in_buffer
from runtime._parts import Part, Requests, Staging, parts_of, staging_of
from runtime.artifact.reader import Artifact
from runtime.budget import used_bytes
from runtime.flash import Reader, Ticket
from runtime.sparsity import Residency
from runtime.token_time import computed_bytes, dram_seconds
from runtime.trace import Recorder
from schemas.device import flash_seconds
from schemas.errors import DoesNotFitError
from schemas.families import FamilyName, num_units
from schemas.layout import Plan
from schemas.manifest import MANIFEST_FILE
from schemas.metrics import RunMetrics

MAX_READ_BYTES = 512 << 10
"""Longest single read: devices reach their peak bandwidth before, and longer ones leave fewer to run side by side."""
LEAST_HALF_BYTES = 128 << 10
"""Smaller halves of a read buffer are not used apart: neighbours share a page, which is read for both."""
ARRIVAL_BYTES = 1 << 20
"""Read between two batches of a fetch, at least: with less, calls would cost more than they let overlap."""


@dataclass(frozen=True)
class Batch:
    """Units that are in memory until the next batch is asked for: `rows(family)[slots[i]]` is unit `ids[i]`."""

    ids: np.ndarray
    """int32 [m]."""
    slots: np.ndarray
    """int32 [m]."""


class Store:
    """The units of one artifact under one plan."""

    def __init__(
        self,
        artifact: Artifact,
        plan: Plan,
        flash: Reader,
        recorder: Recorder | None = None,
        requests: Requests | None = None,
    ) -> None:
        """Allocates everything the budget covers and loads the pinned units.

        Args:
            artifact: The open artifact.
            plan: One of its plans, or one from `runtime.budget.choose_plan`.
            flash: `Flash` of a file in runtime/flash, made for the artifact.
            recorder: Takes down every `fetch` and `stream`, for a simulation of the same run.
            requests: All that will be fetched, where that is known, for policies that look ahead.

        Raises:
            ColdpressError: if the plan's cache policy cannot be used here.
            DoesNotFitError: if the plan's parts exceed its budget, or this machine's memory.
        """
        self.plan, self.counters = plan, Counters()
        self.dram_used_bytes = used_bytes(artifact.manifest, plan)
        _check_fits(plan, self.dram_used_bytes, physical_bytes() if flash.moves_data else plan.dram_budget_bytes)
        self._flash, self._recorder, self._manifest = flash, recorder, artifact.manifest
        self._use_read_units = uses_read_units(plan)
        self._modelled = artifact.manifest.device.flash.issuing(plan.queue_depth)
        self._page_bytes = artifact.manifest.flash.page_bytes
        # one fetch reads no page more than twice and no unit twice, so that more than that would never be touched,
        # whatever a plan says
        self._buffer = _native.aligned_buffer(min(plan.read_buffer_bytes, 2 * artifact.manifest.flash.size_bytes))
        self._extents = hashlib.sha256()
        self._parts = parts_of(artifact, plan, requests)
        self._rows: dict[FamilyName, np.ndarray] = {}
        self._staging: dict[FamilyName, Staging] = {}
        for entry in artifact.manifest.families:
            family: FamilyName = entry.family
            self._staging[family] = staging = staging_of(plan, family, num_units(family, artifact.manifest.model))
            self._rows[family] = np.empty((staging.first_slot + staging.num_slots, entry.unit_bytes), np.uint8)
        for (_, family), part in self._parts.items():
            self._load_pinned(part, family)

    def _load_pinned(self, part: Part, family: FamilyName) -> None:
        pinned = part.in_flash_order(np.flatnonzero(part.cache.present))
        for batch in self._read(self._planned(part, part.position[pinned], self._buffer.size)):
            ids = pinned[batch.first_unit : batch.first_unit + batch.buffer_offset.size]
            self._copy(family, part.slot[ids], batch.buffer_offset)
            self.counters.load_reads += len(batch.extents)
            self.counters.load_read_bytes += batch.extents.num_bytes

    def rows(self, family: FamilyName) -> np.ndarray:
        """uint8 [slots, unit_bytes]: the memory that `Batch.slots` index; the same array for the store's whole life."""
        return self._rows[family]

    def residency(self, layer: int, family: FamilyName) -> Residency:
        """Which units a fetch would not have to read, and where the others lie."""
        part = self._parts[layer, family]
        return Residency(part.cache.present, part.position)

    def close(self) -> None:
        """Closes the device; nothing can be read any more."""
        self._flash.close()

    def reset(self) -> None:
        """Begins a new context, such as another prompt: what policies count per context starts anew; units stay."""
        if self._recorder:
            self._recorder.reset()
        for part in self._parts.values():
            part.cache.reset()

    def end_tokens(self, count: int = 1) -> None:
        """Says that the units of `count` tokens, decoded together, were fetched: what policies count per token."""
        if self._recorder:
            self._recorder.end_tokens(count)
        for part in self._parts.values():
            self.counters.evictions += part.end_tokens(count)

    def fetch(self, layer: int, family: FamilyName, ids: np.ndarray) -> Iterator[Batch]:
        """Brings units into memory.

        First comes one batch of what is there already, while the rest is being read, then batches of that as they
        arrive. Between two batches nothing that was yielded in this fetch is overwritten but staging slots, so each
        batch must be used before the next is asked for. A fetch that is given up, or fails, leaves the cache without
        the units that were not read.

        Args:
            layer: Layer number.
            family: Family on flash.
            ids: Unit ids, int32 [k], distinct and ascending.

        Yields:
            Batches that cover `ids` exactly once, at most a read buffer's units each. Under a plan with
            `use_read_units` they also cover, once, what is in memory already, and what lies whole inside the reads;
            the cache learns of `ids` only.

        Raises:
            CorruptPageError: if a page read is damaged.
        """
        part = self._parts[layer, family]
        if self._recorder:
            self._recorder.fetch(layer, family, ids)
        present = part.cache.touch(ids)
        hits, misses = ids[present], ids[~present]
        self.counters.hits += hits.size
        self.counters.misses += misses.size
        planned, units = self._reads_for(part, misses)
        if self._use_read_units:
            hits = np.flatnonzero(part.cache.present).astype(np.int32)
        self.counters.used_bytes += units.size * part.units.unit_bytes
        self.counters.active_bytes += (hits.size + units.size) * part.units.unit_bytes
        incoming = Incoming(planner.batches(planned, self._buffer.size), self._begin)
        try:
            if hits.size:
                yield Batch(hits, part.slot[hits])
            if units.size:
                self.counters.evictions += part.admit(misses)
                yield from self._arriving(part, family, units, incoming)
        finally:
            incoming.abandon()

    def _reads_for(self, part: Part, misses: np.ndarray) -> tuple[planner.ReadPlan, np.ndarray]:
        """The reads that bring `misses`, and the units that a token takes from them: int32, in flash order."""
        positions = np.sort(part.position[misses])
        planned = self._planned(part, positions, self._buffer.size)
        if self._use_read_units:
            brought = planner.brought(part.units, part.order.size, planned.extents)
            positions = brought[~part.cache.present[part.order[brought]]]
            planned = planner.inside(part.units, positions, planned.extents)
        return planned, part.order[positions]

    def _arriving(self, part: Part, family: FamilyName, units: np.ndarray, incoming: Incoming) -> Iterator[Batch]:
        """Batches of `units`, which are what the reads bring, as they arrive."""
        staging, num_read = self._staging[family], 0
        try:
            while incoming.under_way:
                batch, ticket = incoming.under_way
                for first, last, count in planner.arrivals(batch, part.units.unit_bytes, ARRIVAL_BYTES):
                    ticket.wait(count)
                    ids = units[batch.first_unit + first : batch.first_unit + last]
                    for start, stop, slots in part.runs(ids, staging):
                        self._copy(family, slots, batch.buffer_offset[first + start : first + stop])
                        num_read = batch.first_unit + first + stop
                        if first + stop == batch.buffer_offset.size:
                            self.counters.flash_s += ticket.finish()
                            incoming.begin_next()  # the buffer is free again
                        yield Batch(ids[start:stop], slots)
        finally:
            part.forget(units[num_read:])

    def _begin(self, batch: planner.Batch) -> Ticket:
        """Has the reads of a batch begin, and counts them."""
        self.counters.reads += len(batch.extents)
        self.counters.read_bytes += batch.extents.num_bytes
        self.counters.modelled_flash_s += self._modelled_seconds(batch)
        return self._submit(batch, self._buffer)

    def _read(self, planned: planner.ReadPlan) -> Iterator[planner.Batch]:
        """Makes the reads, a buffer at a time, one after the other."""
        for batch in planner.batches(planned, self._buffer.size):
            self._submit(batch, self._buffer).finish()
            yield batch

    def _planned(self, part: Part, positions: np.ndarray, room: int) -> planner.ReadPlan:
        """The reads for units at ascending flash positions, none longer than `room` bytes."""
        gap_bytes, max_bytes = self.plan.collapse_gap_bytes, self._max_read_bytes(part, room)
        return planner.plan_reads(part.units, positions, self._page_bytes, gap_bytes, max_bytes)

    def _max_read_bytes(self, part: Part, room: int) -> int:
        return max(min(MAX_READ_BYTES, room), span_bytes(part.units.unit_bytes, self._page_bytes))

    def _submit(self, batch: planner.Batch, into: np.ndarray) -> Ticket:
        self._extents.update(batch.extents.offsets.astype("<i8").tobytes())
        self._extents.update(batch.extents.lengths.astype("<i8").tobytes())
        return self._flash.submit(batch.extents, into)

    def _modelled_seconds(self, batch: planner.Batch) -> float:
        return float(flash_seconds(self._modelled, len(batch.extents), batch.extents.num_bytes))

    def _copy(self, family: FamilyName, slots: np.ndarray, offsets: np.ndarray) -> None:
        """Copies units from the read buffer to their slots."""
        if not self._flash.moves_data:
            return
        rows = self._rows[family]
        windows = np.lib.stride_tricks.sliding_window_view(self._buffer, rows.shape[1])
        step = max(1, COPY_BYTES // rows.shape[1])
        for start in range(0, slots.size, step):
            rows[slots[start : start + step]] = windows[offsets[start : start + step]]

    def stream(self, layer: int, family: FamilyName) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All units of a family of a layer in flash order: the prefill's dense pass.

        What lies between the units of one layer of a group is read along, or left out, whichever takes the artifact's
        device less time.

        Args:
            layer: Layer number.
            family: Family on flash.

        Yields:
            (unit ids int32 [m], rows uint8 [m, unit_bytes]), as many as half of the read buffer holds, while the other
            half is being filled; or all of it, where half has no room for a unit. The rows are views of the buffer, so
            they are gone when the next ones are asked for.

        Raises:
            CorruptPageError: if a page read is damaged.
        """
        part = self._parts[layer, family]
        if self._recorder:
            self._recorder.stream(layer, family)
        room = self._dense_room(part)
        halves = (
            [self._buffer[:room], self._buffer[room : 2 * room]] if 2 * room <= self._buffer.size else [self._buffer]
        )
        under_way: deque[tuple[planner.Batch, Ticket, np.ndarray]] = deque()
        try:
            for number, batch in enumerate(self._dense_batches(part, room)):
                into = halves[number % len(halves)]
                under_way.append((batch, self._submit(batch, into), into))
                if len(under_way) == len(halves):
                    yield self._arrived(part, *under_way.popleft())
            while under_way:
                yield self._arrived(part, *under_way.popleft())
        finally:
            for _, ticket, _ in under_way:
                ticket.abandon()

    def _arrived(
        self, part: Part, batch: planner.Batch, ticket: Ticket, buffer: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The units of a batch of the dense pass, counted."""
        self.counters.prefill_flash_s += ticket.finish()
        self.counters.prefill_reads += len(batch.extents)
        self.counters.prefill_read_bytes += batch.extents.num_bytes
        ids = part.order[batch.first_unit : batch.first_unit + batch.buffer_offset.size]
        return ids, in_buffer(buffer, batch.buffer_offset, part.units)

    def _dense_room(self, part: Part) -> int:
        """Bytes of the read buffer that a batch of the dense pass may take: half, or all where that is too little."""
        half = self._buffer.size // 2 // self._page_bytes * self._page_bytes
        least = max(LEAST_HALF_BYTES, span_bytes(part.units.unit_bytes, self._page_bytes))
        return half if half >= least else self._buffer.size

    def _dense_batches(self, part: Part, room: int) -> Iterator[planner.Batch]:
        """A pass over all units of a part: from front to back, or around the other layers of its group."""
        num_units, max_bytes = part.order.size, self._max_read_bytes(part, room)
        whole = planner.sequential_batches(part.units, num_units, self._page_bytes, room, max_bytes)
        if part.units.stride_bytes == part.units.unit_bytes:
            return whole
        apart = self._planned(part, np.arange(num_units), room)
        if room < span_bytes(part.units.stride_bytes, self._page_bytes):
            return planner.batches(apart, room)  # no room for what lies between
        length = part.units.stride_bytes * num_units
        around_s = flash_seconds(self._modelled, len(apart.extents), apart.extents.num_bytes)
        through_s = flash_seconds(self._modelled, -(-length // max_bytes), length)
        return whole if through_s <= around_s else planner.batches(apart, room)

    def extents_sha256(self) -> str:
        """Digest over offsets, then lengths (int64, little-endian) of all reads so far, call by call."""
        return self._extents.hexdigest()

    def _dram_seconds(self, num_tokens: int) -> float:
        computed, counted = computed_bytes(self._manifest, self.plan), self.counters
        return dram_seconds(self._manifest.device, computed, num_tokens, counted.active_bytes, counted.used_bytes)

    def metrics(self, num_tokens: int, decode_s: float, prefill_s: float, first_token_s: float) -> RunMetrics:
        """The counters as a record, with what only the caller knows: decoded tokens and seconds."""
        counted = self.counters
        return RunMetrics(
            num_tokens=num_tokens,
            hits=counted.hits,
            misses=counted.misses,
            evictions=counted.evictions,
            reads=counted.reads,
            read_bytes=counted.read_bytes,
            used_bytes=counted.used_bytes,
            active_bytes=counted.active_bytes,
            modelled_flash_s=counted.modelled_flash_s,
            modelled_dram_s=self._dram_seconds(num_tokens),
            flash_s=counted.flash_s,
            decode_s=decode_s,
            prefill_reads=counted.prefill_reads,
            prefill_read_bytes=counted.prefill_read_bytes,
            prefill_s=prefill_s,
            first_token_s=first_token_s,
            dram_budget_bytes=self.plan.dram_budget_bytes,
            dram_used_bytes=self.dram_used_bytes,
            peak_rss_bytes=peak_rss_bytes(),
            extents_sha256=self.extents_sha256(),
            direct_io=self._flash.direct,
        )


def uses_read_units(plan: Plan) -> bool:
    """Whether a token also uses what is in DRAM, and what the reads for its units bring (runtime/sparsity)."""
    options = _plugins.options_of(_plugins.load("runtime.sparsity", plan.method), plan.options)
    return bool(getattr(options, "use_read_units", False))


def _check_fits(plan: Plan, needed: int, available: int) -> None:
    if needed > plan.dram_budget_bytes:
        raise DoesNotFitError(
            f"{MANIFEST_FILE}: {plan.title} needs {needed} bytes of DRAM, its budget is "
            f"{plan.dram_budget_bytes}; take the plan from choose_plan"
        )
    if needed > available:
        raise DoesNotFitError(
            f"{MANIFEST_FILE}: {plan.title} needs {needed} bytes of DRAM, this machine has {available}; give a "
            "smaller --dram-budget"
        )


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """The most memory this process has had resident: weights, tables, libraries and the interpreter."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux
