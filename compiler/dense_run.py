"""A dense run of a model under a DRAM budget: what a build's choice is held against, and what it should be if nothing
is faster.

The same weights in the same format, every unit used on every token, or every one of the experts that a router picks,
each of them as often as another. Whole layers are pinned until the DRAM is spent, since a layer that is read at all
waits for a first byte; the rest is streamed in the model's own order. The read buffer is the one of least time, so that
dense is not judged by buffers that suit another method. Reads are the runtime's own (runtime/store/planner.py), their
seconds the device's law; the text plays no part.
"""

from collections.abc import Iterator

import numpy as np

from coldpress.compiler.cost_model import (
    PEAK_READ_BYTES,
    kv_cache_bytes,
    read_buffer_bytes,
    resident_bytes,
    tensor_bytes,
    unit_bytes,
)
from coldpress.compiler.sections import dense_bookkeeping_bytes
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.store import planner
from coldpress.runtime.store.clock import dram_seconds, fetch_seconds, looked_up_roles
from coldpress.runtime.store.reads import longest_read_bytes, modelled_flash_s, room_bytes
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import WHOLE_MLP, FormatName, num_experts, num_units, used_share
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.metrics import DenseRun
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.sparsity import Sparsity


def dense_run(
    model: Model,
    format_name: FormatName,
    context_length: int,
    budget_bytes: int,
    device: DeviceProfile,
    kv_cache_format: KvCacheFormat = "fp16",
) -> DenseRun | None:
    """The fastest dense run of `budget_bytes` of DRAM on `device`; None where not even its buffers fit."""
    spec = model.spec
    unit, page_bytes = unit_bytes(WHOLE_MLP, spec, format_name), device.flash.page_bytes.value
    resident = resident_bytes(model, (WHOLE_MLP,), format_name)
    kv_cache = kv_cache_bytes(spec, context_length, kv_cache_format)
    total = spec.num_hidden_layers * num_units(WHOLE_MLP, spec)
    room = budget_bytes - resident - kv_cache - dense_bookkeeping_bytes(spec, format_name, page_bytes)
    computed = computed_bytes(model, format_name, resident, kv_cache)
    found: list[DenseRun] = []
    for buffer_bytes in _buffer_sizes(span_bytes(unit, page_bytes), min(room, PEAK_READ_BYTES), page_bytes):
        pinned = total if total * unit <= room else (room - buffer_bytes) // unit  # nothing is read: no buffer
        reads, read_bytes, flash_s, token_s = _streamed(device, unit, spec, total - pinned, buffer_bytes)
        found.append(
            DenseRun(
                reads_per_token=reads,
                flash_bytes_per_token=read_bytes,
                flash_s=flash_s,
                dram_s=dram_seconds(device, computed, 1, int(total * used_share(WHOLE_MLP, spec)) * unit),
                token_s=token_s + dram_seconds(device, computed, 1),
                read_buffer_bytes=buffer_bytes,
                pinned_bytes=pinned * unit,
            )
        )
    return min(found, key=lambda run: run.token_s, default=None)


def computed_bytes(model: Model, format_name: FormatName, resident: int, kv_cache: int) -> int:
    """Bytes of DRAM that computing a token reads besides units and predictors (runtime/store/clock.py, before there is
    an artifact).

    Args:
        model: Its tensors.
        format_name: How they are stored.
        resident: Bytes of all resident tensors, looked-up ones among them.
        kv_cache: Bytes of the whole KV cache; a token reads half of it, on average.
    """
    roles = [role for role in looked_up_roles(model.spec) if role in model.tensors]
    return resident - sum(tensor_bytes(role, model.tensors[role].shape, format_name) for role in roles) + kv_cache // 2


def read_units(
    device: DeviceProfile, unit: int, positions: np.ndarray, gap_bytes: int, buffer_bytes: int
) -> tuple[int, int, float]:
    """(reads, bytes, flash seconds) of units of `unit` bytes at `positions`, through a read buffer of `buffer_bytes`.

    Args:
        device: Its pages and its law.
        unit: Bytes of a unit; one follows the other.
        positions: integers [k], ascending.
        gap_bytes: Reads at most this far apart become one.
        buffer_bytes: At least what one unit may take.
    """
    page_bytes = device.flash.page_bytes.value
    room = room_bytes(buffer_bytes, page_bytes, span_bytes(unit, page_bytes))
    longest = longest_read_bytes(room, unit, page_bytes)
    plan = planner.plan_reads(planner.Strided(0, unit, unit), positions, page_bytes, gap_bytes, longest)
    return len(plan.extents), plan.extents.num_bytes, modelled_flash_s(device.flash, plan, buffer_bytes, room)


def buffer_of(model: Model, sparsity: Sparsity, free_bytes: int, device: DeviceProfile) -> int:
    """Bytes of a build's read buffer: that of the best dense run where every neuron is used, else a share of what is
    free.

    Args:
        model: Its shape and tensors.
        sparsity: Families, densities, format, context, KV cache and the DRAM budget count.
        free_bytes: What resident tensors, predictors, KV cache and bookkeeping leave.
        device: For its pages, and for its law where the run is dense.
    """
    layers = range(model.spec.num_hidden_layers)
    densities = {family: tuple(sparsity.density(family, layer) for layer in layers) for family in sparsity.families}
    if densities == {WHOLE_MLP: (used_share(WHOLE_MLP, model.spec),) * len(layers)}:
        budget = sparsity.budget.dram_budget_bytes
        run = dense_run(model, sparsity.format, sparsity.context_length, budget, device, sparsity.kv_cache)
        if run is not None:
            return run.read_buffer_bytes
    page_bytes = device.flash.page_bytes.value
    return read_buffer_bytes(model.spec, sparsity.format, sparsity.families, free_bytes, page_bytes)


def _buffer_sizes(least: int, most: int, page_bytes: int) -> Iterator[int]:
    """Sizes worth trying, whole pages, each half as large again as the one before."""
    size = least
    while size <= most:
        yield size
        size = -(-3 * size // 2 // page_bytes) * page_bytes


def _streamed(
    device: DeviceProfile, unit: int, spec: ModelSpec, num_streamed: int, buffer_bytes: int
) -> tuple[int, int, float, float]:
    """(reads, bytes, flash seconds, seconds with all layers' units computed) of a token that streams so many units:
    whole layers, and one layer's rest."""
    per_layer = num_units(WHOLE_MLP, spec)
    used_bytes = int(per_layer * used_share(WHOLE_MLP, spec)) * unit
    whole, rest = divmod(num_streamed, per_layer)
    totals = np.zeros(4)
    for layers, count in ((whole, per_layer), (int(rest > 0), rest), (spec.num_hidden_layers - whole - (rest > 0), 0)):
        for used in _used_together(spec) if layers else ():
            positions = np.flatnonzero(used[per_layer - count :]) + per_layer - count  # what is pinned lies before them
            read = read_units(device, unit, positions, 0, buffer_bytes)
            share = layers / len(_used_together(spec))
            totals += share * np.array([*read, fetch_seconds(device, read[2], used_bytes, 0)])
    return round(totals[0]), round(totals[1]), float(totals[2]), float(totals[3])


def _used_together(spec: ModelSpec) -> list[np.ndarray]:
    """The units that a token may use of a layer, bool [num_units] each, one as often as the other: all, or those of
    experts as far from each other as they can be, counted from each expert."""
    experts, units = num_experts(WHOLE_MLP, spec), num_units(WHOLE_MLP, spec)
    step = experts // spec.num_experts_per_tok
    found = []
    for first in range(experts):
        used = np.zeros(experts, bool)
        used[(first + step * np.arange(spec.num_experts_per_tok)) % experts] = True
        found.append(np.repeat(used, units // experts))
    return found
