"""Finds the fastest dense run of a model under a DRAM budget: every choice is compared with it, and a build should use
it if nothing is faster.

It has the same weights in the same format, and uses all units on every token, or all units of the experts that a router
picks, experts equally likely. Attention is resident. Either whole layers are pinned until the DRAM is spent, since a
partly read layer still waits for a first byte; or every layer has as many pinned units, and the next layer's others are
read ahead while a layer computes. The rest is streamed in the model's own order, in large sequential reads. Buffers are
those of least time. A naive run pins nothing and reads nothing ahead (LLM in a flash, Table 2).
compiler/dense_stream.py gives reads and seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from coldpress.compiler.cost_model import (
    PEAK_READ_BYTES,
    HasShapes,
    kv_cache_bytes,
    read_buffer_bytes,
    resident_bytes,
    stored_format,
    unit_bytes,
)
from coldpress.compiler.dense_stream import Stream, Token
from coldpress.compiler.seconds import Setting
from coldpress.compiler.sections import dense_bookkeeping_bytes, make_sections
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.plan.budget import table_bytes
from coldpress.runtime.quantization._mixed import coarsest, format_at
from coldpress.runtime.store import resident as besides
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import (
    BLOCKS,
    WHOLE_MLP,
    FamilyName,
    FormatName,
    Formats,
    dense_family,
    layers_of,
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
    reads_ahead: bool = True,
    family: FamilyName | None = None,
) -> DenseRun | None:
    """Returns the fastest dense run within `budget_bytes` of DRAM on `device`; None where its buffers alone exceed it.

    Args:
        room_bytes: DRAM for units and the read buffer; None for that of a build of this run alone, with the default
            cache. A build that may take another method or cache keeps more beside them.
        naive: Pin no unit, regardless of room.
        reads_ahead: Whether a run that reads ahead is considered, too.
        family: The family of the MLP's units; None for a dense run's own.
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
    runs = _Runs(stream, room, _Besides.of(manifest, plan), _RowReads.of(manifest, plan))
    whole = min((runs.in_whole_layers(size, pins=not naive) for size in sizes), key=_token_s)
    # a router's choice is not known before its layer
    if naive or spec.is_mixture or not reads_ahead or whole.pinned_bytes == runs.units_bytes:
        return whole
    ahead = runs.best_ahead(whole.read_buffer_bytes, sizes, page_bytes)
    return whole if ahead is None else min(whole, ahead, key=_token_s)


def _stream(spec: ModelSpec, device: DeviceProfile, formats: Formats, family: FamilyName) -> Stream:
    """Returns the units of a dense run; where layers' formats differ, as if all were as large as in the mean, and as
    fast as in the coarsest."""
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


class _Besides(NamedTuple):
    token_s: float
    seconds_before: tuple[float, ...]
    """By layer with units, the part of it that precedes the layer's request."""

    @classmethod
    def of(cls, manifest: Manifest, plan: Plan) -> "_Besides":
        before = besides.seconds_before(manifest, plan)
        return cls(besides.token_seconds(manifest, plan), tuple(before.values()))


@dataclass(frozen=True)
class _Runs:
    stream: Stream
    room_bytes: int
    """DRAM for pinned units and buffers."""
    besides: _Besides
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

    def best_ahead(self, buffer_bytes: int, buffer_sizes: Sequence[int], page_bytes: int) -> DenseRun | None:
        """Returns the fastest run that reads ahead, None where no preload buffer fits: first the best preload buffer
        beside the given read buffer, then the best read buffer beside that."""
        room, least = self.room_bytes - buffer_bytes, span_bytes(self.stream.largest_bytes, page_bytes)
        missing_bytes = (self.num_units * self.stream.unit_bytes - room) // self.stream.num_layers
        most = min(room, 2 * missing_bytes + least)  # the buffer takes DRAM, so that more than this is missing
        found = [self.ahead(buffer_bytes, size) for size in _buffer_sizes(least, most, page_bytes)]
        if not found:
            return None
        first = min(found, key=_token_s)
        others = [size for size in buffer_sizes if size + first.preload_buffer_bytes <= self.room_bytes]
        return min((self.ahead(size, first.preload_buffer_bytes) for size in others), key=_token_s, default=first)

    def ahead(self, buffer_bytes: int, preload_bytes: int) -> DenseRun:
        pinned = min(self.num_units, (self.room_bytes - buffer_bytes - preload_bytes) // self.stream.unit_bytes)
        token = self.stream.ahead(self.num_units - pinned, buffer_bytes, preload_bytes, self.besides.seconds_before)
        return self._run(token, pinned, buffer_bytes, preload_bytes)

    def _run(self, token: Token, pinned: int, buffer_bytes: int, preload_bytes: int) -> DenseRun:
        holds_tables = pinned == self.num_units and self.units_bytes + self.rows.table_bytes <= self.room_bytes
        rows = _RowReads(0, 0, 0.0, 0.0) if holds_tables else self.rows
        token_s = self.besides.token_s - self.rows.seconds + rows.seconds
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
    """Returns the dense run that an artifact is compared with: same model, formats, device, and budget of `plan`."""
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
    """0 where nothing is read ahead; else a dense run pins as many units in each layer."""


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
        run = dense_run(model, *shape, sparsity.kv_cache, room_bytes=free_bytes, reads_ahead=alone, family=family)
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
