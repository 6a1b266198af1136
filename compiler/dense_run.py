"""A dense run of a model under a DRAM budget: what a build's choice is held against, and what it should be if nothing
is faster.

The same weights in the same format, every unit used on every token. Whole layers are pinned until the DRAM is spent,
since a layer that is read at all waits for a first byte; the rest is streamed in the model's own order. The read buffer
is the one of least time, so that dense is not judged by buffers that suit another method. Reads are the runtime's own
(runtime/planner.py), their seconds the device's law; the text plays no part.
"""

from collections.abc import Iterator

import numpy as np

from compiler.cost_model import (
    MIN_STAGING_SLOTS,
    PEAK_READ_BYTES,
    WHOLE_MLP,
    Buffers,
    buffers_for,
    kv_cache_bytes,
    resident_bytes,
    tensor_bytes,
    unit_bytes,
)
from runtime import planner
from runtime._extents import span_bytes
from runtime.store import MAX_READ_BYTES
from runtime.token_time import dram_seconds, looked_up_roles
from schemas.device import DeviceProfile, flash_seconds
from schemas.families import FormatName, num_units
from schemas.metrics import DenseRun
from schemas.model import Model
from schemas.sparsity import Sparsity


def dense_run(
    model: Model, format_name: FormatName, context_length: int, budget_bytes: int, device: DeviceProfile
) -> DenseRun | None:
    """The fastest dense run of `budget_bytes` of DRAM on `device`; None where not even its buffers fit."""
    spec = model.spec
    unit, page_bytes = unit_bytes(WHOLE_MLP, spec, format_name), device.flash.page_bytes.value
    resident, kv_cache = resident_bytes(model, (WHOLE_MLP,), format_name), kv_cache_bytes(spec, context_length)
    total = spec.num_hidden_layers * num_units(WHOLE_MLP, spec)
    room = budget_bytes - resident - kv_cache - MIN_STAGING_SLOTS * unit
    looked_up = sum(
        tensor_bytes(role, model.tensors[role].shape, format_name)
        for role in looked_up_roles(spec)
        if role in model.tensors
    )
    computed = resident - looked_up + kv_cache // 2
    found: list[DenseRun] = []
    for buffer_bytes in _buffer_sizes(span_bytes(unit, page_bytes), min(room, PEAK_READ_BYTES), page_bytes):
        pinned = min(total, (room - buffer_bytes) // unit)
        reads, read_bytes, flash_s = _streamed(device, unit, num_units(WHOLE_MLP, spec), total - pinned, buffer_bytes)
        found.append(
            DenseRun(
                reads_per_token=reads,
                flash_bytes_per_token=read_bytes,
                flash_s=flash_s,
                dram_s=dram_seconds(device, computed, 1, total * unit, (total - pinned) * unit),
                read_buffer_bytes=buffer_bytes,
                pinned_bytes=pinned * unit,
            )
        )
    return min(found, key=lambda run: run.flash_s + run.dram_s, default=None)


def buffers_of(model: Model, sparsity: Sparsity, free_bytes: int, device: DeviceProfile) -> Buffers:
    """The buffers of a build: those of the best dense run where every neuron is used, else a share of what is free.

    Args:
        model: Its shape and tensors.
        sparsity: Families, densities, format, context and the DRAM budget count.
        free_bytes: What resident tensors, predictors and KV cache leave.
        device: For its pages, and for its law where the run is dense.
    """
    layers = range(model.spec.num_hidden_layers)
    densities = {family: tuple(sparsity.density(family, layer) for layer in layers) for family in sparsity.families}
    if densities == {WHOLE_MLP: (1.0,) * len(layers)}:
        budget = sparsity.budget.dram_budget_bytes
        run = dense_run(model, sparsity.format, sparsity.context_length, budget, device)
        if run is not None:
            staging = MIN_STAGING_SLOTS * unit_bytes(WHOLE_MLP, model.spec, sparsity.format)
            slots = ((WHOLE_MLP, MIN_STAGING_SLOTS),)
            return Buffers(run.read_buffer_bytes, slots, run.read_buffer_bytes + staging)
    return buffers_for(model.spec, sparsity.format, densities, free_bytes, device.flash.page_bytes.value)


def _buffer_sizes(least: int, most: int, page_bytes: int) -> Iterator[int]:
    """Sizes worth trying, whole pages, each half as large again as the one before."""
    size = least
    while size <= most:
        yield size
        size = -(-3 * size // 2 // page_bytes) * page_bytes


def _streamed(
    device: DeviceProfile, unit: int, units_per_layer: int, num_streamed: int, buffer_bytes: int
) -> tuple[int, int, float]:
    """(reads, bytes, flash seconds) of a token that streams `num_streamed` units, whole layers and one layer's rest."""
    whole, rest = divmod(num_streamed, units_per_layer)
    totals = np.zeros(3)
    for layers, count in ((whole, units_per_layer), (1, rest)):
        if layers and count:
            first = units_per_layer - count  # what is pinned lies before it
            totals += layers * np.array(_one_layer(device, unit, first, units_per_layer, buffer_bytes))
    return int(totals[0]), int(totals[1]), float(totals[2])


def _one_layer(device: DeviceProfile, unit: int, first: int, stop: int, buffer_bytes: int) -> tuple[int, int, float]:
    page_bytes = device.flash.page_bytes.value
    longest = max(min(MAX_READ_BYTES, buffer_bytes), span_bytes(unit, page_bytes))
    plan = planner.plan_reads(planner.Strided(0, unit, unit), np.arange(first, stop), page_bytes, 0, longest)
    seconds = sum(
        float(flash_seconds(device.flash, len(batch.extents), batch.extents.num_bytes))
        for batch in planner.batches(plan, buffer_bytes)
    )
    return len(plan.extents), plan.extents.num_bytes, seconds
