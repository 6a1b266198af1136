"""Finds the fastest dense run of a model under a DRAM budget: every choice is compared with it, and a build should use
it if nothing is faster.

It has the same weights in the same format, and uses all units on every token, or all units of the experts that a router
picks, experts equally likely. Attention is resident. Either whole layers are pinned until the DRAM is spent, since a
partly read layer still waits for a first byte; or every layer has as many pinned units, and the next layer's others are
preloaded while a layer computes. The rest is streamed in the model's own order, through buffers of least time. A naive
run pins nothing and preloads nothing (LLM in a flash, Table 2).

A token uses every unit, so preloading never reads the wrong one; a layer's request then reads the rest, which the
preload buffer had no room for. tests/compiler/test_dense_run.py checks that reads and seconds equal those of the store
and its clock (runtime/store/preload.py, clock.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from coldpress.compiler.cost_model import (
    PEAK_READ_BYTES,
    HasShapes,
    kv_cache_bytes,
    read_buffer_bytes,
    resident_bytes,
    stored_format,
    unit_bytes,
)
from coldpress.compiler.seconds import Reading, Reads, Setting
from coldpress.compiler.sections import dense_bookkeeping_bytes, make_sections
from coldpress.runtime.dram.budget import table_bytes
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.quantization._mixed import coarsest, format_at
from coldpress.runtime.store import resident as besides
from coldpress.runtime.store.clock import FlashQueue
from coldpress.runtime.store.computing import Weights, Work, deciding_seconds, request_work
from coldpress.runtime.store.planner import Strided
from coldpress.runtime.store.preload_room import first_batch
from coldpress.schemas.device import DeviceProfile, Flash, flash_seconds
from coldpress.schemas.families import (
    BLOCKS,
    WHOLE_MLP,
    FamilyName,
    FormatName,
    Formats,
    UnitFormat,
    dense_family,
    layers_of,
    num_experts,
    num_units,
    slice_formats,
    slices,
    unit_format,
    used_share,
    with_kept,
    with_own,
)
from coldpress.schemas.layout import KvCacheFormat, Plan
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import DenseRun
from coldpress.schemas.model import MatrixRole, Model, ModelSpec
from coldpress.schemas.sparsity import Sparsity


class DenseToken(NamedTuple):
    """A token's figures, summed over the requests of all layers."""

    reads: float
    read_bytes: float
    flash_s: float
    """Seconds of the reads alone."""
    work_s: float
    """Seconds of the requests without their reads."""
    requests_s: float
    """Seconds of the requests."""


class DensePreload(NamedTuple):
    num_units: int
    reads: int
    read_bytes: int
    flash_s: float


NO_PRELOAD = DensePreload(0, 0, 0, 0.0)


@dataclass(frozen=True)
class Stream:
    """The units of a dense run, which every token uses."""

    spec: ModelSpec
    device: DeviceProfile
    family: FamilyName
    format: UnitFormat
    unit_bytes: int
    """Bytes of a unit; where layers' formats differ, in the mean."""
    largest_bytes: int

    @property
    def num_layers(self) -> int:
        return len(layers_of(self.family, self.spec))

    @property
    def num_units(self) -> int:
        return num_units(self.family, self.spec)

    @property
    def used_bytes(self) -> int:
        return int(self.num_units * used_share(self.family, self.spec)) * self.unit_bytes

    @property
    def weights(self) -> Weights:
        return Weights(self.format, self.used_bytes)

    def in_whole_layers(self, num_streamed: int, buffer_bytes: int) -> DenseToken:
        """Returns the figures of a token that reads `num_streamed` units of all layers: whole layers, and the last
        units of one more. Layers that read equally much take equally long."""
        layers = self.num_layers
        shape = self.num_units, num_experts(self.family, self.spec), self.spec.num_experts_per_tok
        whole, rest = divmod(num_streamed, self.num_units)
        totals = np.zeros(5)
        for times, count in ((whole, self.num_units), (int(rest > 0), rest), (layers - whole - (rest > 0), 0)):
            flash: Any = self.device.flash  # records are frozen, thus hashable, which type checkers do not see
            requests = _requests(flash, self.unit_bytes, buffer_bytes, count, shape) if times else ()
            for read, num_read in requests:
                work = self._work(read, num_read, NO_PRELOAD)
                seconds = read.flash_s, work.seconds, work.with_reads(read.arrival)
                totals += times / len(requests) * np.array([read.num_reads, read.num_bytes, *seconds])
        return DenseToken(*totals.tolist())

    def preloaded(
        self, num_streamed: int, buffer_bytes: int, preload_bytes: int, seconds_before: Sequence[float]
    ) -> DenseToken:
        """Returns the figures of a token that reads `num_streamed` units, as many in each layer, and preloads the
        first of them; `seconds_before` is what each layer with units computes before its request."""
        layers = self.num_layers
        flash: Any = self.device.flash
        counts = [units_of_layer(num_streamed, layer, layers) for layer in range(layers)]
        preloads = [_preload(flash, self.unit_bytes, preload_bytes, self.num_units, count) for count in counts]
        queue, totals = FlashQueue(), np.zeros(5)
        queue.begin(preloads[0].flash_s)  # the token before has preloaded the first layer
        for layer, (count, preload, before_s) in enumerate(zip(counts, preloads, seconds_before, strict=True)):
            not_preloaded = count - preload.num_units
            ((read, _),) = _requests(flash, self.unit_bytes, buffer_bytes, not_preloaded, (self.num_units, 1, 1))
            work = self._work(read, count, preload)
            queue.compute(before_s)
            request_s = queue.fetch_s(read.arrival, work, needs_queue=preload.num_units > 0)
            after = preloads[(layer + 1) % layers]
            guess_s = deciding_seconds(self.device, after.num_units > 0)
            queue.compute(guess_s)
            queue.begin(after.flash_s)
            totals += np.array([read.num_reads, read.num_bytes, read.flash_s, work.seconds, request_s])
            totals += np.array([after.reads, after.read_bytes, after.flash_s, guess_s, guess_s])
        return DenseToken(*totals.tolist())

    def _work(self, read: Reads, num_read: int, preload: DensePreload) -> Work:
        read_bytes, preloaded_bytes = num_read * self.unit_bytes, preload.num_units * self.unit_bytes
        sizes = self.used_bytes - read_bytes, read_bytes, 0
        return request_work(self.device, self.weights, *sizes, read.arrival.num_portions, preloaded_bytes)


def units_of_layer(num_units: int, layer: int, layers: int) -> int:
    """Returns the share of `num_units` that a layer has of as many in each; the whole numbers add up to all."""
    return num_units * (layer + 1) // layers - num_units * layer // layers


@lru_cache(maxsize=4096)  # a search asks again for whole layers with every budget, selector and format
def _requests(
    flash: Flash, unit_bytes: int, buffer_bytes: int, count: int, shape: tuple[int, int, int]
) -> tuple[tuple[Reads, int], ...]:
    """Returns the reads of equally likely requests that read those of the last `count` units, which are not in DRAM,
    that a token uses, and how many units these are; `shape` has units and experts of a layer, and experts of a
    token."""
    reading, first = Reading(flash, Strided(0, unit_bytes, unit_bytes), 0, buffer_bytes), shape[0] - count
    read = [np.flatnonzero(used[first:]) + first for used in _used_together(*shape)]
    return tuple((reading.reads(positions), positions.size) for positions in read)


@lru_cache(maxsize=4096)
def _preload(flash: Flash, unit_bytes: int, preload_bytes: int, units: int, count: int) -> DensePreload:
    """Returns the preloads for a layer whose last `count` units are on flash: the first that fit the buffer."""
    if not count:
        return NO_PRELOAD
    positions, units_on_flash = np.arange(units - count, units), Strided(0, unit_bytes, unit_bytes)
    batch = first_batch(units_on_flash, positions, flash.page_bytes.value, 0, preload_bytes)
    reads, read_bytes = len(batch.extents), batch.extents.num_bytes
    return DensePreload(batch.buffer_offset.size, reads, read_bytes, float(flash_seconds(flash, reads, read_bytes)))


def _used_together(units: int, experts: int, experts_per_token: int) -> list[np.ndarray]:
    """Returns equally likely sets of a layer's units that one token uses, bool [num_units]: all units, or those of
    experts spaced as far apart as possible, starting once from each expert."""
    step = experts // experts_per_token
    found = []
    for first in range(experts):
        used = np.zeros(experts, bool)
        used[(first + step * np.arange(experts_per_token)) % experts] = True
        found.append(np.repeat(used, units // experts))
    return found


def dense_run(
    model: HasShapes,
    formats: Formats,
    context_length: int,
    budget_bytes: int,
    device: DeviceProfile,
    kv_cache_format: KvCacheFormat = "fp16",
    *,
    room_bytes: int | None = None,
    naive: bool = False,
    preloads: bool = True,
    family: FamilyName | None = None,
) -> DenseRun | None:
    """Returns the fastest dense run within `budget_bytes` of DRAM on `device`; None where its buffers alone exceed it.

    `room_bytes` is the DRAM for units and the read buffer; None for a build of this run alone, with the default cache,
    since another method or cache keeps more beside them. A `naive` run pins no unit, regardless of room. `family` is
    that of the MLP's units; None for a dense run's own.
    """
    spec = model.spec
    family = family or dense_family(spec)
    page_bytes = device.flash.page_bytes.value
    format_name, resident = coarsest(formats), resident_bytes(model, (family,), formats)
    kv_cache = kv_cache_bytes(spec, context_length, kv_cache_format)
    besides_units = resident + kv_cache + dense_bookkeeping_bytes(spec, format_name, page_bytes, family=family)
    room = budget_bytes - besides_units if room_bytes is None else room_bytes
    stream = _stream(spec, device, formats, family)
    span = span_bytes(stream.largest_bytes, page_bytes)
    sizes = list(_buffer_sizes(span, min(room, PEAK_READ_BYTES), page_bytes))
    if not sizes:
        return None
    plan = _plan(context_length, budget_bytes, resident, kv_cache, kv_cache_format, device)
    sections = make_sections(spec, (family,), stream.format)
    manifest = Setting(model, formats, device, sections, plan).manifest
    before = tuple(besides.seconds_before(manifest, plan).values())
    runs = _Runs(stream, room, besides.token_seconds(manifest, plan), before, _RowReads.of(manifest, plan))
    whole = min((runs.in_whole_layers(size, pins=not naive) for size in sizes), key=_token_s)
    # a router's choice is not known before its layer
    if naive or spec.is_mixture or not preloads or whole.pinned_bytes == runs.units_bytes:
        return whole
    preloaded = runs.best_preloaded(whole.read_buffer_bytes, sizes, page_bytes)
    return whole if preloaded is None else min(whole, preloaded, key=_token_s)


def _stream(spec: ModelSpec, device: DeviceProfile, formats: Formats, family: FamilyName) -> Stream:
    """Returns a dense run's units; where formats differ, of the mean size and of the coarsest format's speed."""
    names = [format_at(formats, layer, family) for layer in layers_of(family, spec)]
    name = names[0] if len({*names}) == 1 else coarsest(formats)
    sizes = [unit_bytes(family, spec, one) for one in names]
    return Stream(spec, device, family, name, int(fmean(sizes)), max(sizes))


class _RowReads(NamedTuple):
    """A token's rows of the matrices that are read by row, unless there is DRAM for the matrices."""

    table_bytes: int
    reads: int
    read_bytes: float
    seconds: float

    @classmethod
    def of(cls, manifest: Manifest, plan: Plan) -> "_RowReads":
        tables, page_bytes = manifest.flash.tables, manifest.flash.page_bytes
        read_bytes = sum(besides.row_read_bytes(table, page_bytes) for table in tables)
        return cls(table_bytes(manifest), len(tables), read_bytes, besides.row_seconds(manifest, plan))


@dataclass(frozen=True)
class _Runs:
    stream: Stream
    room_bytes: int
    """DRAM for pinned units and buffers."""
    besides_s: float
    """Seconds of a token besides its requests for units."""
    seconds_before: Sequence[float]
    """By layer with units, the part of them that precedes the layer's request."""
    rows: _RowReads

    @property
    def units_bytes(self) -> int:
        return self.num_units * self.stream.unit_bytes

    @property
    def num_units(self) -> int:
        return self.stream.num_layers * self.stream.num_units

    def in_whole_layers(self, buffer_bytes: int, *, pins: bool = True) -> DenseRun:
        size = self.stream.unit_bytes
        # with room for everything nothing is read, so that the buffer's size does not matter
        fits = self.num_units * size <= self.room_bytes
        pinned = 0 if not pins else self.num_units if fits else (self.room_bytes - buffer_bytes) // size
        return self._run(self.stream.in_whole_layers(self.num_units - pinned, buffer_bytes), pinned, buffer_bytes, 0)

    def best_preloaded(self, buffer_bytes: int, buffer_sizes: Sequence[int], page_bytes: int) -> DenseRun | None:
        """Returns the fastest run that preloads, None where no preload buffer fits: first the best preload buffer
        beside the given read buffer, then the best read buffer beside that."""
        room, least = self.room_bytes - buffer_bytes, span_bytes(self.stream.largest_bytes, page_bytes)
        missing_bytes = (self.num_units * self.stream.unit_bytes - room) // self.stream.num_layers
        most = min(room, 2 * missing_bytes + least)  # the buffer takes DRAM, so that more than this is missing
        found = [self.preloaded(buffer_bytes, size) for size in _buffer_sizes(least, most, page_bytes)]
        if not found:
            return None
        first = min(found, key=_token_s)
        others = [size for size in buffer_sizes if size + first.preload_buffer_bytes <= self.room_bytes]
        return min((self.preloaded(size, first.preload_buffer_bytes) for size in others), key=_token_s, default=first)

    def preloaded(self, buffer_bytes: int, preload_bytes: int) -> DenseRun:
        pinned = min(self.num_units, (self.room_bytes - buffer_bytes - preload_bytes) // self.stream.unit_bytes)
        token = self.stream.preloaded(self.num_units - pinned, buffer_bytes, preload_bytes, self.seconds_before)
        return self._run(token, pinned, buffer_bytes, preload_bytes)

    def _run(self, token: DenseToken, pinned: int, buffer_bytes: int, preload_bytes: int) -> DenseRun:
        holds_tables = pinned == self.num_units and self.units_bytes + self.rows.table_bytes <= self.room_bytes
        rows = _RowReads(0, 0, 0.0, 0.0) if holds_tables else self.rows
        token_s = self.besides_s - self.rows.seconds + rows.seconds
        return DenseRun(
            reads_per_token=round(token.reads) + rows.reads,
            flash_bytes_per_token=round(token.read_bytes + rows.read_bytes),
            flash_s=token.flash_s + rows.seconds,
            dram_s=token.work_s + token_s,
            token_s=token.requests_s + token_s,
            read_buffer_bytes=buffer_bytes,
            preload_buffer_bytes=preload_bytes,
            pinned_bytes=pinned * self.stream.unit_bytes,
        )


def _token_s(run: DenseRun) -> float:
    return run.token_s


def dense_for(model: Model, manifest: Manifest, plan: Plan, *, naive: bool = False) -> DenseRun | None:
    shape = plan.context_length, plan.dram_budget_bytes, manifest.device, plan.kv_cache
    return dense_run(model, formats_of(manifest), *shape, naive=naive)


def formats_of(manifest: Manifest) -> Formats:
    """Returns the formats of all matrices; those of an MLP that stay in DRAM have the families' own."""
    spec, base = manifest.model, manifest.families[0].format
    known: dict[tuple[int, MatrixRole], FormatName] = {}
    for (layer, family), name in manifest.unit_formats.items():
        pieces = slices(family, spec)
        for piece, own in zip(pieces, slice_formats(name, len(pieces)), strict=True):
            known[layer, piece.role] = own
    layers, whole = range(spec.num_hidden_layers), slices(WHOLE_MLP, spec)
    found = tuple(unit_format([known.get((layer, piece.role), base) for piece in whole]) for layer in layers)
    formats = with_own(base if {*found} == {base} else found, manifest.head)
    tensors = [(one.role, one.format) for one in (*manifest.resident, *manifest.flash.tables) if one.format is not None]
    return with_kept(formats, {role: own for role, own in tensors if stored_format(role, formats) != own})


class Buffers(NamedTuple):
    read: int
    preload: int
    """0 where nothing is preloaded; else a dense run pins as many units in each layer."""


def buffers_of(model: Model, sparsity: Sparsity, free_bytes: int, device: DeviceProfile) -> Buffers:
    """Returns a build's usual buffers: the best dense run's if every neuron is used, else a share for reads alone. Of
    `sparsity` families, densities, format, context, KV cache, layer groups and the DRAM budget count; `free_bytes` is
    what resident tensors, predictors, KV cache and bookkeeping leave."""
    layers = range(model.spec.num_hidden_layers)
    densities = {family: tuple(sparsity.density(family, layer) for layer in layers) for family in sparsity.families}
    (family, *others) = sparsity.families
    if not others and family in (WHOLE_MLP, BLOCKS) and {*densities[family]} == {used_share(family, model.spec)}:
        shape = (sparsity.formats, sparsity.context_length, sparsity.budget.dram_budget_bytes, device)
        # in a group, one read brings a unit's parts of several layers
        alone = sparsity.layers_per_group == 1 and sparsity.is_whole
        run = dense_run(model, *shape, sparsity.kv_cache, room_bytes=free_bytes, preloads=alone, family=family)
        if run is not None:
            return Buffers(run.read_buffer_bytes, run.preload_buffer_bytes)
    page_bytes = device.flash.page_bytes.value
    return Buffers(read_buffer_bytes(model.spec, sparsity.formats, sparsity.families, free_bytes, page_bytes), 0)


def _buffer_sizes(least: int, most: int, page_bytes: int) -> Iterator[int]:
    """Yields sizes worth trying, in whole pages: each half as large again as the one before, and the largest."""
    size, largest = least, most // page_bytes * page_bytes
    while size < largest:
        yield size
        size = -(-3 * size // 2 // page_bytes) * page_bytes
    if largest >= least:
        yield largest


def _plan(
    context_length: int,
    budget_bytes: int,
    resident: int,
    kv_cache: int,
    kv_cache_format: KvCacheFormat,
    device: DeviceProfile,
) -> Plan:
    return Plan(
        name="dense",
        method="dense",
        cache="static",
        dram_budget_bytes=budget_bytes,
        context_length=context_length,
        resident_bytes=resident,
        predictor_bytes=0,
        kv_cache=kv_cache_format,
        kv_cache_bytes=kv_cache,
        read_buffer_bytes=device.flash.page_bytes.value,
        collapse_gap_bytes=0,
        queue_depth=device.flash.queue_depth.value,
        parts=(),
    )
