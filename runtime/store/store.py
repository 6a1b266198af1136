"""Ids in, rows in memory out: cache, slots, read plan and reads under one DRAM budget.

`submit` is the path of a decoded token: it looks the ids up in the cache, lets the policy admit and evict, plans the
reads and begins them. The request that it returns yields rows in batches, first the units in memory, then the others as
they arrive. `stream` is the prefill's dense pass.

A family's units in DRAM lie in one array for all layers, each layer's pinned units and then its cached ones; where
formats of layers differ, in one array for each size of units. A unit keeps its slot as long as it is cached: kernels
take slot numbers, so rows need not be compacted as in LLM in a flash 3.3, and an evicted unit's slot is simply the next
to be filled. Direct reads cover whole pages and units lie packed, so a unit cannot be read straight into its slot: the
reading threads copy stored units to their slots, and kernels use the other units in the read buffer.

Counters, digests and clocks observe the store (runtime/store/facts.py).
"""

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.dram.budget import as_run, holds_tables, whole_bytes
from coldpress.runtime.dram.memory import peak_rss_bytes
from coldpress.runtime.flash import Flash
from coldpress.runtime.sparsity import Residency, uses_read_units
from coldpress.runtime.store import planner
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.counters import Counters
from coldpress.runtime.store.dense import Blocks, DenseBatch, DensePlan, held_blocks, read_blocks
from coldpress.runtime.store.facts import Key, Observer, Observers, Purpose, RequestFacts
from coldpress.runtime.store.gap import AdaptiveGap
from coldpress.runtime.store.memory import Memory, PoolMemory
from coldpress.runtime.store.preload import PreloadedUnits, Preloader
from coldpress.runtime.store.request import Batch, Device, Incoming, PlannedUnits, Request
from coldpress.runtime.store.resident import row_seconds, token_seconds
from coldpress.runtime.store.rows import Rows
from coldpress.runtime.store.slots import Part, Requests, parts_of, resized
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.families import num_experts
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import RunMetrics

_Known = tuple[Key, np.ndarray, np.ndarray | None, int, int, int]
"""The fields of `RequestFacts` that are known before the cache is asked, in their order."""


class Store:
    def __init__(
        self, artifact: Artifact, plan: Plan, flash: Flash, *observers: Observer, requests: Requests | None = None
    ) -> None:
        """Allocates everything the budget covers and loads the pinned units.

        Args:
            plan: One of the artifact's plans, or one from `coldpress.runtime.dram.budget.choose_plan`.
            observers: Further observers beside the store's counters, for example a `Recorder` or a `Clock`.
            requests: All requests to come, if they are known, for policies that look ahead.

        Raises:
            ColdpressError: if the plan's cache policy cannot be used here.
            DoesNotFitError: if the plan's parts exceed its budget, or this machine's memory.
        """
        plan = as_run(artifact.manifest, plan)
        self._manifest, self._page_bytes = artifact.manifest, artifact.manifest.flash.page_bytes
        self._memory = Memory(artifact.manifest, plan, flash.moves_data)
        tables = artifact.manifest.flash.tables
        self._rows = Rows(tables[0], self._page_bytes, self._memory.zeros) if tables else None
        self.counters = Counters()
        self._given_observers = observers
        self.clock = next((observer for observer in observers if isinstance(observer, Clock)), None)
        self._load(self._set_up(artifact, plan, flash, requests))

    def _set_up(
        self, artifact: Artifact, plan: Plan, flash: Flash, requests: Requests | None = None
    ) -> dict[Key, np.ndarray]:
        """Builds all that depends on the plan, except memory; returns each part's pinned units, which must be read."""
        self.plan = plan
        self._law = self._manifest.device.flash.issuing(plan.queue_depth)
        self._use_read_units = uses_read_units(plan)
        learns = plan.collapse == "adaptive" and not self._use_read_units
        self._gap = AdaptiveGap(plan.collapse_gap_bytes, self._page_bytes) if learns else None
        self._observers = Observers((self.counters, *([self._gap] if self._gap else []), *self._given_observers))
        self._device = Device(flash, self._observers)
        self._parts = parts_of(artifact, plan, requests)
        self.preloader = self._preloader_of(plan)
        self._under_way: Request | Incoming[DenseBatch] | None = None
        return {key: np.flatnonzero(part.cache.present) for key, part in self._parts.items()}

    def _preloader_of(self, plan: Plan) -> Preloader:
        begin, zeros, sections = self._device.begin, self._memory.zeros, self._manifest.flash.sections
        return Preloader(plan, sections, self._page_bytes, self._parts, begin, zeros, self._observers)

    @property
    def dram_used_bytes(self) -> int:
        return self._memory.used_bytes

    @property
    def blocks(self) -> str:
        """Returns all that decides where the blocks of `stream` end, as text."""
        return f"{self._memory.reading_bytes} {self.plan.collapse_gap_bytes} {self._law.model_dump_json()}"

    def resize(self, artifact: Artifact, plan: Plan) -> None:
        """Switches, between two requests, to a plan that differs only in its budget and in the units of its parts.

        Cached units stay as long as they fit, in the policy's order, and newly pinned units are read. Raises as
        `__init__`: if the plan does not fit, nothing has changed; if the system refuses the memory, caches begin anew
        under the former plan; if a read fails, pinned units that are missing become ordinary ones, which requests read.
        """
        plan = as_run(artifact.manifest, plan)
        with self._or_back(artifact, plan):
            self._memory.take(plan)
            self.plan = plan
            self._release_rows(plan)
            self.preloader.close()  # its memory is freed before pools grow
            moves, unread = resized(artifact, plan, self._parts)
            self._memory.move(moves)
            self._memory.resize_buffer(loading=True)
            self.preloader = self._preloader_of(plan)
            self._load(unread)

    def switch(self, artifact: Artifact, plan: Plan) -> None:
        """Switches, between two requests, to another plan of the same selector; caches begin with its pinned units.
        Counters go on. Raises as `resize`."""
        plan = as_run(artifact.manifest, plan)
        with self._or_back(artifact, plan):
            self._renew(artifact, plan)

    def _renew(self, artifact: Artifact, plan: Plan) -> None:
        if self.clock is not None:
            self.clock.follow(self._manifest, plan)
        self.preloader.close()
        self._release_rows(plan)
        self._parts = {}  # freed before the new ones exist
        self._memory.renew(plan)
        self._load(self._set_up(artifact, plan, self._device.flash))

    @contextmanager
    def _or_back(self, artifact: Artifact, plan: Plan) -> Generator[None]:
        """Goes back to the present plan if the system has no memory for `plan`, to which the block switches."""
        self._settle()
        self._memory.check(plan)
        before = self.plan
        try:
            yield
        except MemoryError as error:
            self._renew(artifact, before)
            raise DoesNotFitError(
                f"this machine has no memory for another budget; the run goes on with {before.dram_budget_bytes} bytes"
            ) from error

    def _load(self, unread: dict[Key, np.ndarray]) -> None:
        """Reads pinned units; empties `unread`. If a read fails, units that are missing become ordinary ones."""
        try:
            for key in list(unread):
                self._load_pinned(key, unread[key])
                del unread[key]
            if self._rows is not None and holds_tables(self._manifest, self.plan):
                self._rows.load(self._device)
        finally:
            for key, ids in unread.items():  # their slots hold nothing: they must not pass for present
                self._parts[key].unpin(ids)
            self._memory.resize_buffer(loading=False)

    def _load_pinned(self, key: Key, ids: np.ndarray) -> None:
        part = self._parts[key]
        memory = self._memory.pools[part.pool]
        planned = self._planned(part, memory, ids)
        batches = planner.batches(planned.plan, memory.room_bytes)
        incoming = Incoming(self._device, Purpose.LOAD, batches, memory, planned)
        try:
            deque(incoming, maxlen=0)
        finally:
            incoming.close()

    def _release_rows(self, plan: Plan) -> None:
        if self._rows is not None and not holds_tables(self._manifest, plan):
            self._rows.release()

    @property
    def num_rows(self) -> int:
        """Returns the number of token embeddings on flash; 0 where they are in resident.safetensors."""
        return sum(table.num_rows for table in self._manifest.flash.tables)

    def expect_rows(self, tokens: np.ndarray) -> None:
        """Begins to read the token embeddings that the next pass needs, int [T], if they lie on flash."""
        if self._rows is not None:
            self._rows.begin(self._device, tokens)

    def read_rows(self, tokens: np.ndarray, purpose: Purpose = Purpose.ROWS) -> np.ndarray:
        """Returns the stored token embeddings of `tokens`, int [T], from flash, or from DRAM if the plan holds them:
        uint8 [T, row_bytes]; [T, 0] where the artifact has none on flash. Raises `CorruptPageError` or `DeviceError` if
        a read fails twice."""
        if self._rows is None:
            return np.empty((len(tokens), 0), np.uint8)
        return self._rows.take(self._device, purpose, tokens)

    def residency(self, key: Key) -> Residency:
        """Returns which units of a layer's family are in DRAM, and where all its units lie on flash."""
        self._settle()
        part = self._parts[key]
        return Residency(part.cache.present, part.position)

    def close(self) -> None:
        self._settle()
        self.preloader.drop()
        if self._rows is not None:
            self._rows.drop()
        self._device.flash.close()

    def reset(self) -> None:
        """Begins a new context, for example another prompt: counts per context restart at zero; units stay."""
        self._settle()
        self.preloader.drop()  # only a token that failed has left any
        for reset in self._observers.reset:
            reset()
        for part in self._parts.values():
            part.cache.reset()

    def end_tokens(self, count: int = 1) -> None:
        """Ends `count` tokens that were decoded together, for policies and observers that count tokens."""
        self._settle()
        num_evicted = sum(part.end_tokens(count) for part in self._parts.values())
        self.preloader.end_tokens()
        for end_tokens in self._observers.end_tokens:
            end_tokens(count, num_evicted)

    def preload(self, key: Key, ids: np.ndarray) -> None:
        self._settle()
        self.preloader.begin(key, ids)

    def submit(self, key: Key, ids: np.ndarray, kept: np.ndarray | None = None) -> "Request | tuple[Batch, ...]":
        """Makes all decisions about the units that a token uses, and begins to read the missing ones.

        `ids` are int32 [k], distinct and ascending; `kept` are the units that may stay in the cache; None for all.

        Returns batches, to be iterated over once, that hold each unit of `ids` exactly once: a tuple if nothing is
        missing. Under a plan with `use_read_units` they also hold, once, all other units in memory and all units that
        lie entirely inside the reads; the cache counts `ids` only. The request ends when the next one is submitted.
        Raises `CorruptPageError` or `DeviceError` if the device reads inside this call (runtime/flash/serial.py).
        """
        self._settle()
        part = self._parts[key]
        memory = self._memory.pools[part.pool]
        present = part.cache.touch(ids)
        known = (key, ids, kept, part.units.unit_bytes, memory.room_bytes, self._memory.buffer.size)
        if not present.all():
            return self._submit_misses(part, memory, present, known)
        # fast path: nothing to admit, plan or read; with a warm cache this is most requests
        used = _where(part.cache.present) if self._use_read_units else ids
        facts = RequestFacts(*known, num_hits=ids.size, num_resident=used.size)
        for request in self._observers.request:
            request(facts)
        return (Batch(used, part.slots(used), memory.slots.rows),) if used.size else ()

    def _submit_misses(self, part: Part, memory: PoolMemory, present: np.ndarray, known: _Known) -> Request:
        """Submits a request some of whose units are missing; `present` is bool [k]."""
        key, ids, kept, *_ = known
        hits, misses = ids[present], ids[~present]
        # The order matters: reads are planned from the cache before `admit` changes it, and observers learn of the
        # request before its first read begins.
        preloaded = self.preloader.take(key, misses) if self.preloader.enabled else []
        plan, units = self._reads_for(part, memory, misses, preloaded)
        used = _where(part.cache.present) if self._use_read_units else hits
        slots = part.slots(used)  # read before `admit` gives the slots of evicted units to others
        admitted, evicted = part.admit(misses if kept is None else misses[np.isin(misses, kept, assume_unique=True)])
        facts = RequestFacts(
            *known,
            num_hits=hits.size,
            num_resident=used.size,
            num_preloaded=sum(each.ids.size for each in preloaded),
            num_read=units.size,
            num_stored=admitted.size,
            num_evicted=evicted.size,
            plan=plan,
        )
        for request in self._observers.request:
            request(facts)
        resident, evicted_hits = Batch(used, slots, memory.slots.rows), None
        if self._use_read_units and (is_evicted := np.isin(used, evicted)).any():
            evicted_hits, resident = resident.some(is_evicted), resident.some(~is_evicted)
        planned = PlannedUnits(plan, units, part.cache.contains(units), part.slots(units))
        replan = partial(self._planned, part, memory)
        self._under_way = Request(self._device, part, memory, resident, evicted_hits, planned, preloaded, replan)
        return self._under_way

    def _reads_for(
        self, part: Part, memory: PoolMemory, misses: np.ndarray, preloaded: list[PreloadedUnits]
    ) -> tuple[planner.ReadPlan, np.ndarray]:
        """Plans the reads for the units of `misses` that were not `preloaded`. Returns the plan, and the units that
        the token takes from it, int32 in flash order."""
        wanted = np.zeros(part.order.size, bool)
        wanted[part.position[misses]] = True
        for each in preloaded:
            wanted[part.position[each.ids]] = False
        positions = wanted.nonzero()[0]  # a mask over positions sorts by flash position without a sort
        longest = memory.longest_read_bytes
        gap_bytes = self._gap.gap_bytes if self._gap else self.plan.collapse_gap_bytes
        plan = planner.plan_reads(part.units, positions, self._page_bytes, gap_bytes, longest)
        if self._use_read_units:
            # the reads bring these units anyway, so the token uses all of them that are not yet in memory
            brought = planner.brought(part.units, part.order.size, plan.extents)
            in_memory = part.cache.present
            for each in preloaded:
                in_memory[each.ids] = True
            positions = brought[~in_memory[part.order[brought]]]
            plan = planner.inside(part.units, positions, plan.extents)
        return plan, part.units_at(positions)

    def _planned(self, part: Part, memory: PoolMemory, ids: np.ndarray) -> PlannedUnits:
        """Plans the reads for units of a part with the plan's gap, for loading and for failed preloads."""
        units = part.in_flash_order(ids)
        positions, gap_bytes = part.position[units], self.plan.collapse_gap_bytes
        plan = planner.plan_reads(part.units, positions, self._page_bytes, gap_bytes, memory.longest_read_bytes)
        return PlannedUnits(plan, units, part.cache.contains(units), part.slots(units))

    def _settle(self) -> None:
        """Closes the request or dense pass in flight and frees its buffer; the cache forgets its unread units."""
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None

    def stream(self, key: Key, ids: np.ndarray | None = None) -> Blocks:
        """Begins the prefill's dense pass: reads units in flash order, or takes them from their slots if all are there.

        In a layer group, the bytes between two units of the layer are read or skipped, whichever takes the artifact's
        device less time. The pass ends when the next one begins, or when a request is submitted. `ids` are all units of
        the experts that a prompt's tokens use, int32 ascending; None for all units.
        """
        self._settle()
        for stream in self._observers.stream:
            stream(key, ids)
        part, gap_bytes = self._parts[key], self.plan.collapse_gap_bytes
        memory = self._memory.pools[part.pool]
        num_units, page_bytes = part.order.size, self._page_bytes
        in_slots = self._memory.is_whole and bool(part.cache.present.all())
        # the same blocks as if they were read: sums are made per block, so their bits depend on its size
        room = self._memory.room_if_reading(part.units.unit_bytes) if in_slots else memory.room_bytes
        of_expert = num_units // num_experts(key[1], self._manifest.model)
        plan = DensePlan(part.units, num_units, of_expert, room, page_bytes, gap_bytes, self._law)
        batches = plan.batches(None if ids is None else np.sort(part.position[ids]).astype(np.int64))
        if in_slots:
            return held_blocks(part, memory.slots.rows, batches)
        self._under_way = incoming = Incoming(self._device, Purpose.STREAM, batches, memory)
        return read_blocks(part, incoming)

    def start_counting(self) -> None:
        """Sets the counters and the clock's modelled seconds to zero."""
        self.counters.start()
        if self.clock is not None:
            self.clock.start()

    def metrics(
        self, num_tokens: int, decode_s: float, prefill_s: float, first_token_s: float, num_passes: int | None = None
    ) -> RunMetrics:
        """Returns the counters as a record, with the caller's tokens and seconds. `num_passes` is the number of passes
        if it differs from `num_tokens`; computing counts passes, as tokens of one pass share the weights in DRAM."""
        manifest, plan, clock = self._manifest, self.plan, self.clock
        counted: dict[str, Any] = {
            name: value for name, value in asdict(self.counters).items() if name in RunMetrics.model_fields
        }
        passes = num_tokens if num_passes is None else num_passes
        modelled: dict[str, Any] = {}
        if clock is not None:
            besides_s = passes * token_seconds(manifest, plan)
            modelled = {
                "modelled_flash_s": clock.flash_s + passes * row_seconds(manifest, plan),
                "modelled_dram_s": clock.work_s + besides_s,
                "modelled_s": clock.fetch_s + besides_s,
            }
        return RunMetrics(
            **counted,
            **modelled,
            num_tokens=num_tokens,
            decode_s=decode_s,
            prefill_s=prefill_s,
            first_token_s=first_token_s,
            dram_budget_bytes=plan.dram_budget_bytes,
            dram_used_bytes=self.dram_used_bytes,
            whole_model_bytes=whole_bytes(manifest, plan),
            peak_rss_bytes=peak_rss_bytes(),
            extents_sha256=self.counters.extents_sha256(),
            direct_io=self._device.flash.direct,
        )


def _where(chosen: np.ndarray) -> np.ndarray:
    return chosen.nonzero()[0].astype(np.int32)
