"""Ids in, rows in memory out: cache, planner and flash under one DRAM budget. The runtime's one stateful class.

`fetch` is the path of a decoded token: cache lookup, admission and eviction, read plan, device reads. Reads are under
way before the first units are handed out, and what has arrived is computed with while the rest is read. `stream` is
the prefill's dense pass. The units of a family that are kept lie in one array for all layers, each layer's pinned ones
and then its cached ones. A unit stays in its slot as long as it is cached: kernels take slot numbers, so rows need not
be moved together as in LLM-in-a-flash 3.3, and an evicted unit's slot is simply the next one to be filled. Units lie on
flash packed, so that a read that bypasses the page cache cannot end in their slots: whoever has read them copies those
that are kept, and those that are not are used where they were read to.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.flash import Landing, Reader, Ticket
from coldpress.runtime.plan.bookkeeping import token_bytes
from coldpress.runtime.plan.budget import as_run, holds_everything, used_bytes
from coldpress.runtime.plan.memory import check_fits, physical_bytes
from coldpress.runtime.sparsity import Residency, uses_read_units
from coldpress.runtime.store import planner
from coldpress.runtime.store.ahead import Piece, Preloads
from coldpress.runtime.store.clock import FlashQueue, bytes_before
from coldpress.runtime.store.counters import Counters
from coldpress.runtime.store.gap import gap_of
from coldpress.runtime.store.reads import (
    Begin,
    Brought,
    Half,
    Incoming,
    dense_batches,
    halves,
    in_buffer,
    longest_read_bytes,
    modelled_flash_s,
    room_bytes,
)
from coldpress.runtime.store.slot_memory import SlotMemory, copy_rows, moved
from coldpress.runtime.store.slots import Part, Requests, num_slots, parts_of, resized
from coldpress.runtime.trace import Recorder
from coldpress.schemas.device import flash_seconds
from coldpress.schemas.families import FamilyName
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import RunMetrics

MAX_BUFFER_BYTES = 1 << 30
"""More of a read buffer is not used: places in it are numbers of 32 bits."""
ARRIVAL_BYTES = 1 << 20
"""Read between two batches of a fetch, at least: with less, calls would cost more than they let overlap."""


@dataclass(frozen=True)
class Batch:
    """Units that are in memory until the next batch is asked for: `rows[slots[i]]` is unit `ids[i]`."""

    ids: np.ndarray
    """int32 [m]."""
    slots: np.ndarray
    """int32 [m]."""
    rows: np.ndarray
    """uint8 [slots, unit_bytes]; rows may overlap."""


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
            plan: One of its plans, or one from `coldpress.runtime.plan.budget.choose_plan`.
            flash: `Flash` of a file in runtime/flash, made for the artifact.
            recorder: Takes down every `fetch`, `preload` and `stream`, for a simulation of the same run.
            requests: All that will be fetched, where that is known, for policies that look ahead.

        Raises:
            ColdpressError: if the plan's cache policy cannot be used here.
            DoesNotFitError: if the plan's parts exceed its budget, or this machine's memory.
        """
        plan = as_run(artifact.manifest, plan)
        self.plan, self.counters = plan, Counters()
        self._whole = holds_everything(plan, artifact.manifest.flash.sections)
        self.dram_used_bytes = used_bytes(artifact.manifest, plan)
        check_fits(plan, self.dram_used_bytes, physical_bytes() if flash.moves_data else plan.dram_budget_bytes)
        self._flash, self._recorder, self._manifest = flash, recorder, artifact.manifest
        self._use_read_units = uses_read_units(plan)
        self._modelled = artifact.manifest.device.flash.issuing(plan.queue_depth)
        self._page_bytes = artifact.manifest.flash.page_bytes
        self._buffer = np.zeros(0, np.uint8)
        self._extents = hashlib.sha256()
        self._gap = gap_of(plan, self._page_bytes)
        self._preloads = Preloads(plan, artifact.manifest.flash.sections, self._page_bytes)
        self._queue = FlashQueue(artifact.manifest.device)
        self._bytes_before = bytes_before(artifact.manifest, plan) if plan.preload_buffer_bytes else {}
        self._parts = parts_of(artifact, plan, requests)
        self._memory: dict[FamilyName, SlotMemory] = {}
        self._halves: dict[FamilyName, list[Half]] = {}
        for entry in artifact.manifest.families:
            family: FamilyName = entry.family
            self._memory[family] = SlotMemory(num_slots(plan, family), entry.unit_bytes)
        self._make_buffer(loading=True)
        for (_, family), part in self._parts.items():
            self._load_pinned(part, family, np.flatnonzero(part.cache.present))
        self._make_buffer(loading=False)

    def _make_buffer(self, *, loading: bool) -> None:
        """Allocates the read buffer, if it is to have another size than now.

        A plan that holds everything counts none. It loads units through what the budget has left, and what a decoded
        token will work with; afterwards it keeps room for one unit, in case one could not be read.
        """
        flash, plan, size_bytes = self._manifest.flash, self.plan, self._reading_bytes()
        if self._whole:
            least = max(span_bytes(entry.unit_bytes, flash.page_bytes) for entry in self._manifest.families)
            spare = token_bytes(self._manifest.model, flash.sections) + plan.dram_budget_bytes - self.dram_used_bytes
            size_bytes = max(least, min(size_bytes, spare // flash.page_bytes * flash.page_bytes)) if loading else least
        if self._buffer.size != size_bytes:
            self._halves.clear()
            self._buffer = _native.aligned_buffer(size_bytes)
            for entry in self._manifest.families:
                self._halves[entry.family] = halves(self._buffer, entry.unit_bytes, self._page_bytes)

    def resize(self, artifact: Artifact, plan: Plan) -> None:
        """Goes on under a plan that differs in its budget and its parts' units alone, between two fetches.

        What is cached stays where there is room for it, by the policy's order, and what is pinned anew is read. Raises
        as opening does; where the plan does not fit, nothing has changed; where a read fails, units that the plan pins
        are missing, and are read when they are asked for.
        """
        plan = as_run(artifact.manifest, plan)
        needed = used_bytes(artifact.manifest, plan)
        self._preloads.drop()
        check_fits(plan, needed, physical_bytes() if self._flash.moves_data else plan.dram_budget_bytes)
        self.plan, self.dram_used_bytes = plan, needed
        self._whole = holds_everything(plan, artifact.manifest.flash.sections)
        moves, come = resized(artifact, plan, self._parts)
        for family in sorted(moves, key=lambda family: num_slots(plan, family) - len(self._memory[family].rows)):
            old, new = moves[family]
            self._memory[family] = moved(self._memory[family], num_slots(plan, family), old, new)
        self._make_buffer(loading=True)
        try:
            for layer, family in list(come):
                self._load_pinned(self._parts[layer, family], family, come[layer, family])
                del come[layer, family]
        finally:
            for key, ids in come.items():  # what could not be read is no more there than any other unit
                self._parts[key].unpin(ids)
            self._make_buffer(loading=False)

    def _reading_bytes(self) -> int:
        """The read buffer of a plan that reads."""
        # one fetch reads no page more than twice and no unit twice, so that more than that would never be touched,
        # whatever a plan says
        return min(self.plan.read_buffer_bytes, 2 * self._manifest.flash.size_bytes, MAX_BUFFER_BYTES)

    def _load_pinned(self, part: Part, family: FamilyName, ids: np.ndarray) -> None:
        pinned = part.in_flash_order(ids)
        planned = self._planned(part, part.position[pinned], self._room(family))
        brought = Brought(planned, pinned, np.ones(pinned.size, bool), part.slot[pinned])
        with closing(self._incoming(family, brought, self._submit)) as incoming:
            for batch, ticket, _ in incoming:
                ticket.finish()
                self.counters.load(batch)

    def residency(self, layer: int, family: FamilyName) -> Residency:
        """Which units a fetch would not have to read, and where the others lie."""
        part = self._parts[layer, family]
        return Residency(part.cache.present, part.position)

    def close(self) -> None:
        """Closes the device; nothing can be read any more."""
        self._preloads.drop()
        self._flash.close()

    def reset(self) -> None:
        """Begins a new context, such as another prompt: what policies count per context starts anew; units stay."""
        if self._recorder:
            self._recorder.reset()
        self._preloads.drop()  # of a token that failed
        for part in self._parts.values():
            part.cache.reset()

    def end_tokens(self, count: int = 1) -> None:
        """Says that the units of `count` tokens, decoded together, were fetched: what policies count per token."""
        if self._recorder:
            self._recorder.end_tokens(count)
        for part in self._parts.values():
            self.counters.evictions += part.end_tokens(count)
        self.counters.flash_s += self._preloads.drop()
        self._gap.end_tokens()

    def preload(self, layer: int, family: FamilyName, ids: np.ndarray) -> None:
        """Begins to read units that a fetch of this token will probably ask for, and returns.

        The cache does not change, and learns of nothing. Nothing is read where the plan has no room for it.

        Args:
            layer: The first layer of a section; the units' parts of all its layers are read, where they are missing.
            family: Family on flash.
            ids: Unit ids, int32 [k], distinct and ascending.
        """
        if self._recorder:
            self._recorder.preload(layer, family, ids)
        begun, waited_s = self._preloads.begin(layer, family, ids, self._parts, self._begin)
        counted = self.counters
        counted.flash_s += waited_s
        if begun:
            flash_s = float(flash_seconds(self._modelled, len(begun.extents), begun.extents.num_bytes))
            counted.modelled_flash_s += flash_s
            self._queue.begin(flash_s)
            counted.preload(begun, self._parts[layer, family].units.unit_bytes)

    def fetch(self, layer: int, family: FamilyName, ids: np.ndarray, kept: np.ndarray | None = None) -> Iterator[Batch]:
        """Brings units into memory.

        First comes what is there already, then what was read ahead, then the rest, as it arrives. Each batch must be
        used before the next is asked for: what is not kept is gone then. A fetch that is given up, or fails, leaves the
        cache without the units that were not read.

        Args:
            layer: Layer number.
            family: Family on flash.
            ids: Unit ids, int32 [k], distinct and ascending.
            kept: Those of them that may stay in the cache, ascending; None for all.

        Yields:
            Batches that cover `ids` exactly once, at most a read buffer's units each. Under a plan with
            `use_read_units` they also cover, once, what is in memory already, and what lies whole inside the reads;
            the cache learns of `ids` only.

        Raises:
            CorruptPageError: if a page read is damaged.
        """
        part = self._parts[layer, family]
        if self._recorder:
            self._recorder.fetch(layer, family, ids, kept)
        present = part.cache.touch(ids)
        hits, misses = ids[present], ids[~present]
        self.counters.hits += hits.size
        self.counters.misses += misses.size
        early = self._preloads.take(layer, family, misses, part)
        planned, units = self._reads_for(part, family, misses, early)
        if self._use_read_units:
            hits = np.flatnonzero(part.cache.present).astype(np.int32)
        stay = misses if kept is None else misses[np.isin(misses, kept, assume_unique=True)]
        rows, there = self._memory[family].rows, part.slot[hits]
        evicted = part.admit(stay)
        self.counters.evictions += evicted.size
        brought = Brought(planned, units, part.cache.contains(units), part.slot[units])
        self._queue.compute(self._bytes_before.get((layer, family), 0))
        self._count(part, family, hits.size, brought, early)
        going = np.isin(hits, evicted) if self._use_read_units else np.zeros(hits.size, bool)
        batches = Batch(hits[going], there[going], rows), Batch(hits[~going], there[~going], rows)
        yield from self._arriving(part, family, batches, brought, early)

    def _count(self, part: Part, family: FamilyName, num_there: int, brought: Brought, early: Sequence[Piece]) -> None:
        """Counts what a fetch uses, and what that takes on the artifact's device."""
        flash_s = modelled_flash_s(self._modelled, brought.planned, self._buffer.size, self._room(family))
        num_kept = int(np.count_nonzero(brought.kept))
        num_kept += sum(int(np.count_nonzero(part.cache.contains(piece.units))) for piece in early)
        counted, size, num_early = self.counters, part.units.unit_bytes, sum(piece.units.size for piece in early)
        active_bytes = counted.use(size, num_there, brought.units.size, num_early, num_kept)
        counted.modelled_flash_s += flash_s
        counted.modelled_fetch_s += self._queue.fetch_s(flash_s, active_bytes, num_kept * size, early=bool(early))

    def _reads_for(
        self, part: Part, family: FamilyName, misses: np.ndarray, early: Sequence[Piece]
    ) -> tuple[planner.ReadPlan, np.ndarray]:
        """The reads that bring what of `misses` was not read `early`, and the units that a token takes from them:
        int32, in flash order."""
        wanted = np.zeros(part.order.size, bool)
        wanted[part.position[misses]] = True
        for piece in early:
            wanted[part.position[piece.units]] = False
        positions = np.flatnonzero(wanted)
        gap_bytes = self._gap.want(positions.size * part.units.unit_bytes)
        planned = self._planned(part, positions, self._room(family), gap_bytes)
        if self._use_read_units:
            brought = planner.brought(part.units, part.order.size, planned.extents)
            there = part.cache.present
            for piece in early:
                there[piece.units] = True
            positions = brought[~there[part.order[brought]]]
            planned = planner.inside(part.units, positions, planned.extents)
        return planned, part.order[positions]

    def _arriving(
        self, part: Part, family: FamilyName, there: Sequence[Batch], brought: Brought, early: Sequence[Piece]
    ) -> Iterator[Batch]:
        """What is there, first what makes room and is read over, then what was read ahead, and then what reads bring,
        as it arrives."""
        going, staying = there
        reads = [brought]
        try:
            if going.ids.size:
                yield going
            with closing(self._incoming(family, brought, self._begin)) as incoming:
                if staying.ids.size:
                    yield staying
                for piece in early:
                    yield from self._from_buffer(part, family, piece)
                yield from self._landed(part, family, brought, incoming)
            lost = [units for piece in early if (units := piece.give_up()).size]
            if lost:
                units = part.in_flash_order(np.concatenate(lost))
                planned = self._planned(part, part.position[units], self._room(family))
                again = Brought(planned, units, part.cache.contains(units), part.slot[units])
                reads.append(again)
                with closing(self._incoming(family, again, self._begin)) as incoming:
                    yield from self._landed(part, family, again, incoming)
        finally:
            for some in (*reads, *early):
                part.forget(some.units[some.num_read :])

    def _landed(self, part: Part, family: FamilyName, brought: Brought, incoming: Incoming) -> Iterator[Batch]:
        """What reads bring, as it arrives."""
        for batch, ticket, half in incoming:
            for first, last, count in planner.arrivals(batch, part.units.unit_bytes, ARRIVAL_BYTES):
                ticket.wait(count)
                its = slice(brought.num_read, batch.first_unit + last)
                brought.num_read = its.stop
                ids, slots, kept = brought.units[its], brought.slots[its], brought.kept[its]
                if kept.any():
                    yield Batch(ids[kept], slots[kept], self._memory[family].rows)
                if not kept.all():
                    places = batch.buffer_offset[first:last][~kept].astype(np.int32)
                    yield Batch(ids[~kept], places, half.rows)
            flash_s = ticket.finish()
            self.counters.flash_s += flash_s
            self._gap.observe(batch.extents.num_bytes, flash_s)

    def _from_buffer(self, part: Part, family: FamilyName, piece: Piece) -> Iterator[Batch]:
        """Units that were read ahead, as they arrive; those that are kept are copied to their slots."""
        for ids, places in piece.arrivals(ARRIVAL_BYTES):
            kept = part.cache.contains(ids)
            if self._flash.moves_data:
                copy_rows(piece.rows, places[kept], self._memory[family].rows, part.slot[ids[kept]])
            yield Batch(ids, places, piece.rows)

    def _incoming(self, family: FamilyName, brought: Brought, begin: Begin) -> Incoming:
        """The reads of a plan; those units that are kept go to their slots."""
        rows = self._memory[family].rows
        return Incoming(brought.batches(self._room(family)), self._halves[family], brought.landing_in(rows, begin))

    def _begin(self, batch: planner.Batch, into: np.ndarray, landing: Landing | None = None) -> Ticket:
        """Has the reads of a batch begin, and counts them."""
        self.counters.reads += len(batch.extents)
        self.counters.read_bytes += batch.extents.num_bytes
        return self._submit(batch, into, landing)

    def _room(self, family: FamilyName) -> int:
        """Bytes of the read buffer that a batch may take."""
        return self._halves[family][0].memory.size

    def _planned(self, part: Part, positions: np.ndarray, room: int, gap_bytes: int | None = None) -> planner.ReadPlan:
        """The reads for units at ascending flash positions, none longer than `room` bytes; None: the plan's gap."""
        gap_bytes = self.plan.collapse_gap_bytes if gap_bytes is None else gap_bytes
        max_bytes = longest_read_bytes(room, part.units.unit_bytes, self._page_bytes)
        return planner.plan_reads(part.units, positions, self._page_bytes, gap_bytes, max_bytes)

    def _submit(self, batch: planner.Batch, into: np.ndarray, landing: Landing | None = None) -> Ticket:
        self._extents.update(batch.extents.offsets.astype("<i8").tobytes())
        self._extents.update(batch.extents.lengths.astype("<i8").tobytes())
        return self._flash.submit(batch.extents, into, landing)

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
        pinned = self._whole and bool(part.cache.present.all())
        room, gap_bytes = self._whole_room(part) if pinned else self._room(family), self.plan.collapse_gap_bytes
        batches = dense_batches(part.units, part.order.size, room, self._page_bytes, gap_bytes, self._modelled)
        if pinned:  # in slots in flash order; as many at a time as if they were read, so that sums have the same bits
            first, rows = int(part.slot[part.order[0]]), self._memory[family].rows
            for batch in batches:
                its = slice(batch.first_unit, batch.first_unit + batch.buffer_offset.size)
                yield part.order[its], rows[first + its.start : first + its.stop]
            return
        with closing(Incoming(batches, self._halves[family], self._submit)) as incoming:
            for batch, ticket, half in incoming:
                self.counters.stream(batch, ticket.finish())
                ids = part.order[batch.first_unit : batch.first_unit + batch.buffer_offset.size]
                yield ids, in_buffer(half, batch.buffer_offset, part.units)

    def _whole_room(self, part: Part) -> int:
        """What `_room` would be if the plan read."""
        return room_bytes(self._reading_bytes(), self._page_bytes, span_bytes(part.units.unit_bytes, self._page_bytes))

    def extents_sha256(self) -> str:
        """Digest over offsets, then lengths (int64, little-endian) of all reads so far, call by call."""
        return self._extents.hexdigest()

    def metrics(
        self, num_tokens: int, decode_s: float, prefill_s: float, first_token_s: float, num_passes: int | None = None
    ) -> RunMetrics:
        """The counters as a record, with what only the caller knows: decoded tokens and seconds; `num_passes` where
        that is not as many, since tokens of one pass share the weights that are in DRAM."""
        return self.counters.as_metrics(
            self._manifest,
            self.plan,
            num_tokens=num_tokens,
            num_passes=num_tokens if num_passes is None else num_passes,
            decode_s=decode_s,
            prefill_s=prefill_s,
            first_token_s=first_token_s,
            dram_used_bytes=self.dram_used_bytes,
            extents_sha256=self.extents_sha256(),
            direct_io=self._flash.direct,
        )
