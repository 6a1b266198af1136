"""Finds the fastest dense run of a model under a DRAM budget: every choice is compared with it, and a build should use
it if nothing is faster.

It has the same weights in the same format, and uses all units on every token, or all units of the experts that a router
picks, experts equally likely. Attention is resident. Whole layers are pinned until the DRAM is spent, since a partly
read layer still waits for a first byte; the rest is streamed in the model's own order, in large sequential reads. The
read buffer is the one of least time. A naive run pins nothing (LLM in a flash, Table 2). compiler/seconds.py gives
reads and seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from coldpress.compiler.cost_model import PEAK_READ_BYTES, kv_cache_bytes, read_buffer_bytes, resident_bytes, unit_bytes
from coldpress.compiler.seconds import Reading, Reads, Setting
from coldpress.compiler.sections import dense_bookkeeping_bytes, make_sections
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.generate.speculation import Costs
from coldpress.runtime.store import resident as besides
from coldpress.runtime.store.computing import in_pass, request_work
from coldpress.runtime.store.planner import Strided
from coldpress.schemas.device import DeviceProfile, Flash
from coldpress.schemas.families import WHOLE_MLP, FormatName, num_experts, num_units, used_share
from coldpress.schemas.layout import KvCacheFormat, Plan
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import DenseRun
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.sparsity import Sparsity

MOST_DRAFTS = 8
"""Drafts of a pass that are compared."""


def dense_run(
    model: Model,
    format_name: FormatName,
    context_length: int,
    budget_bytes: int,
    device: DeviceProfile,
    kv_cache_format: KvCacheFormat = "fp16",
    *,
    room_bytes: int | None = None,
    naive: bool = False,
) -> DenseRun | None:
    """Returns the fastest dense run within `budget_bytes` of DRAM on `device`; None where its buffers alone exceed it.

    Args:
        model: The model's shape and tensors.
        format_name: Format of the weights.
        context_length: Tokens that the KV cache holds.
        budget_bytes: The DRAM budget.
        device: The device's law, pages and DRAM.
        kv_cache_format: Format of keys and values.
        room_bytes: DRAM for units and the read buffer; None for that of a build of this run alone, with the default
            cache. A build that may take another method or cache keeps more beside them.
        naive: Pin no unit, regardless of room.
    """
    spec = model.spec
    page_bytes = device.flash.page_bytes.value
    resident = resident_bytes(model, (WHOLE_MLP,), format_name)
    kv_cache = kv_cache_bytes(spec, context_length, kv_cache_format)
    besides_units = resident + kv_cache + dense_bookkeeping_bytes(spec, format_name, page_bytes)
    room = budget_bytes - besides_units if room_bytes is None else room_bytes
    stream = _Stream(spec, device, format_name, unit_bytes(WHOLE_MLP, spec, format_name))
    sizes = list(_buffer_sizes(span_bytes(stream.unit_bytes, page_bytes), min(room, PEAK_READ_BYTES), page_bytes))
    if not sizes:
        return None
    total = spec.num_hidden_layers * stream.num_units
    plan = _plan(context_length, budget_bytes, resident, kv_cache, kv_cache_format, device)
    sections = make_sections(spec, (WHOLE_MLP,), format_name)
    besides_s = besides.token_seconds(Setting(model, format_name, device, sections, plan).manifest, plan)
    found: list[DenseRun] = []
    for buffer_bytes in sizes:
        # with room for everything nothing is read, so that the buffer's size does not matter
        fits = total * stream.unit_bytes <= room
        pinned = 0 if naive else total if fits else (room - buffer_bytes) // stream.unit_bytes
        reads, read_bytes, flash_s, work_s, requests_s = stream.token(total - pinned, buffer_bytes)
        found.append(
            DenseRun(
                reads_per_token=round(reads),
                flash_bytes_per_token=round(read_bytes),
                flash_s=flash_s,
                dram_s=work_s + besides_s,
                token_s=requests_s + besides_s,
                read_buffer_bytes=buffer_bytes,
                pinned_bytes=pinned * stream.unit_bytes,
            )
        )
    return min(found, key=lambda run: run.token_s)


def draft_costs(
    model: Model,
    format_name: FormatName,
    context_length: int,
    budget_bytes: int,
    device: DeviceProfile,
    kv_cache_format: KvCacheFormat = "fp16",
    *,
    room_bytes: int | None = None,
) -> Costs:
    """Returns what drafts from coarse planes cost, and the fastest passes that check them, at most MOST_DRAFTS each.

    The arguments are those of `dense_run`, with a format in planes. Where it does not fit, there are no passes.
    """
    passes = [
        dense_run(
            model,
            format_name,
            context_length,
            budget_bytes,
            in_pass(device, num_tokens),
            kv_cache_format,
            room_bytes=room_bytes,
        )
        for num_tokens in range(1, MOST_DRAFTS + 2)
    ]
    sections = make_sections(model.spec, (WHOLE_MLP,), format_name)
    resident = resident_bytes(model, (WHOLE_MLP,), format_name)
    kv_cache = kv_cache_bytes(model.spec, context_length, kv_cache_format)
    plan = _plan(context_length, budget_bytes, resident, kv_cache, kv_cache_format, device)
    draft_s = besides.draft_seconds(Setting(model, format_name, device, sections, plan).manifest, plan)
    return Costs(draft_s, [run.token_s for run in passes if run is not None])


def dense_for(model: Model, manifest: Manifest, plan: Plan, *, naive: bool = False) -> DenseRun | None:
    """Returns the dense run that an artifact is compared with: same model, format, device, and budget of `plan`."""
    shape = manifest.families[0].format, plan.context_length, plan.dram_budget_bytes, manifest.device, plan.kv_cache
    return dense_run(model, *shape, naive=naive)


def buffer_of(model: Model, sparsity: Sparsity, free_bytes: int, device: DeviceProfile) -> int:
    """Returns the bytes of a build's read buffer: the best dense run's if every neuron is used, else a share.

    Args:
        model: The model's shape and tensors.
        sparsity: Families, densities, format, context, KV cache and the DRAM budget count.
        free_bytes: The DRAM that resident tensors, predictors, KV cache and bookkeeping leave.
        device: The device, for its pages, and for its law where the run is dense.
    """
    layers = range(model.spec.num_hidden_layers)
    densities = {family: tuple(sparsity.density(family, layer) for layer in layers) for family in sparsity.families}
    if densities == {WHOLE_MLP: (used_share(WHOLE_MLP, model.spec),) * len(layers)}:
        shape = (sparsity.format, sparsity.context_length, sparsity.budget.dram_budget_bytes, device)
        run = dense_run(model, *shape, sparsity.kv_cache, room_bytes=free_bytes)
        if run is not None:
            return run.read_buffer_bytes
    page_bytes = device.flash.page_bytes.value
    return read_buffer_bytes(model.spec, sparsity.format, sparsity.families, free_bytes, page_bytes)


def _buffer_sizes(least: int, most: int, page_bytes: int) -> Iterator[int]:
    """Yields sizes worth trying, in whole pages, each half as large again as the one before."""
    size = least
    while size <= most:
        yield size
        size = -(-3 * size // 2 // page_bytes) * page_bytes


def _plan(
    context_length: int,
    budget_bytes: int,
    resident: int,
    kv_cache: int,
    kv_cache_format: KvCacheFormat,
    device: DeviceProfile,
) -> Plan:
    """Builds the parts of a dense run's plan that do not depend on its read buffer."""
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


@dataclass(frozen=True)
class _Stream:
    """The units of a dense run, which every token reads."""

    spec: ModelSpec
    device: DeviceProfile
    format: FormatName
    unit_bytes: int

    @property
    def num_units(self) -> int:
        """The number of units of a layer."""
        return num_units(WHOLE_MLP, self.spec)

    def token(self, num_streamed: int, buffer_bytes: int) -> tuple[float, float, float, float, float]:
        """Returns (reads, bytes, flash seconds, seconds of computing, seconds of all layers' requests) of a token that
        reads `num_streamed` units.

        It reads whole layers and the last units of one more; layers that read equally much take equally long.
        """
        layers = self.spec.num_hidden_layers
        used_bytes = int(self.num_units * used_share(WHOLE_MLP, self.spec)) * self.unit_bytes
        weights = besides.multiplied(self.format, used_bytes, uses_all=True)
        shape = self.num_units, num_experts(WHOLE_MLP, self.spec), self.spec.num_experts_per_tok
        whole, rest = divmod(num_streamed, self.num_units)
        totals = np.zeros(5)
        for times, count in ((whole, self.num_units), (int(rest > 0), rest), (layers - whole - (rest > 0), 0)):
            flash: Any = self.device.flash  # records are frozen, thus hashable, which type checkers do not see
            requests = _requests(flash, self.unit_bytes, buffer_bytes, count, shape) if times else ()
            for read, num_read in requests:
                read_bytes, portions = num_read * self.unit_bytes, read.arrival.num_portions
                work = request_work(self.device, weights, used_bytes - read_bytes, read_bytes, 0, portions)
                seconds = read.flash_s, work.seconds, work.with_reads(read.arrival)
                totals += times / len(requests) * np.array([read.num_reads, read.num_bytes, *seconds])
        reads, read_bytes, flash_s, work_s, requests_s = totals.tolist()
        return reads, read_bytes, flash_s, work_s, requests_s


@lru_cache(maxsize=4096)  # a search asks again for whole layers with every budget, selector and format
def _requests(
    flash: Flash, unit_bytes: int, buffer_bytes: int, count: int, shape: tuple[int, int, int]
) -> tuple[tuple[Reads, int], ...]:
    """Returns the reads of equally likely requests that read those of the last `count` units that a token uses, and
    how many units these are.

    Args:
        flash: The device's flash.
        unit_bytes: Bytes of a unit.
        buffer_bytes: Bytes of the read buffer.
        count: The units of the layer that are not in DRAM.
        shape: Units and experts of a layer, and experts of a token.
    """
    reading, first = Reading(flash, Strided(0, unit_bytes, unit_bytes), 0, buffer_bytes), shape[0] - count
    read = [np.flatnonzero(used[first:]) + first for used in _used_together(*shape)]
    return tuple((reading.reads(positions), positions.size) for positions in read)


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
