"""Computes the numbers of the report from records and activation counts; draws nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coldpress.compiler.activity.packed_bits import adjacent_share
from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.io import load_arrays
from coldpress.compiler.sections import asked_budget_bytes
from coldpress.runtime.artifact.contents import coarse_bytes
from coldpress.runtime.plan.bookkeeping import counted_bytes, joined_bytes
from coldpress.runtime.plan.budget import holds_everything
from coldpress.schemas.activations import Activations, FamilyStatistics
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName, FormatName
from coldpress.schemas.layout import KvCacheFormat, Layout, placed_parts
from coldpress.schemas.metrics import Metrics, Verification
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.package import Package
from coldpress.schemas.plans import Plans
from coldpress.schemas.sparsity import Sparsity

HOT_SHARE = 0.8
"""The share of activations that `hot_units` accounts for (PowerInfer 3.1 and Fig. 5 use the same)."""

HOT_UNITS = 0.2
"""The share of units that count as hottest where texts are compared."""


@dataclass(frozen=True)
class InDram:
    """A run that holds the whole model in DRAM and reads no flash."""

    dram_bytes: int
    tokens_per_s: float
    """Modelled by the device's law."""


@dataclass(frozen=True)
class FrequencyCurve:
    """How often the units of one family of one layer are active, most often first."""

    layer: int
    family: FamilyName
    frequency: np.ndarray
    """float64 [num_units], share of tokens, descending."""

    @property
    def hot_units(self) -> float:
        """Smallest share of units that makes HOT_SHARE of all activations; 0 without activations."""
        total = np.cumsum(self.frequency)
        if total[-1] == 0:
            return 0.0
        return float(np.searchsorted(total, HOT_SHARE * total[-1]) + 1) / total.size


@dataclass(frozen=True)
class HotOverlap:
    """The share of the hottest units of all text that are among the hottest of a part of it.

    Near 1, one placement suits every text.
    """

    layer: int
    family: FamilyName
    context: float
    """Mean over contexts: consecutive tokens that the model saw together."""
    task: float | None
    """Mean over the tasks that the corpus names; None if it names none."""


def make_metrics(
    model: Model, device: DeviceProfile, sparsity: Sparsity, plans: Plans, package: Package, found: Verification
) -> Metrics:
    """Returns the figures of metrics.json."""
    run, plan = found.run, plans.largest_plan
    shared = Metrics.model_fields.keys() & Verification.model_fields.keys()
    return Metrics(
        model=model.name,
        device=device.name,
        method=sparsity.method,
        format=sparsity.format,
        layer_formats=sparsity.layer_formats,
        artifact_bytes=package.artifact_bytes,
        flash_bytes=package.flash_bytes,
        resident_bytes=package.resident_bytes,
        budget_bytes=plan.dram_budget_bytes,
        whole_model_bytes=run.whole_model_bytes,
        flash_bytes_per_token=run.read_bytes / run.num_tokens,
        reads_per_token=run.reads / run.num_tokens,
        hit_rate=run.hit_rate,
        num_measured_blocks=len(found.blocks),
        tokens_per_s=run.num_tokens / run.decode_s,
        modelled_tokens_per_s=run.modelled_tokens_per_s,
        modelled_error=device.modelled_error,
        tried=sparsity.tried,
        **{name: getattr(found, name) for name in shared},
    )


def all_in_dram(
    model: Model, format_name: FormatName, context_length: int, kv_cache: KvCacheFormat, device: DeviceProfile
) -> InDram:
    """Returns the DRAM that the whole model takes, and the speed of the dense run there, which reads nothing."""
    page_bytes = device.flash.page_bytes.value
    (dram_bytes,) = asked_budget_bytes("100%", model, format_name, context_length, kv_cache, page_bytes)
    run = dense_run(model, format_name, context_length, dram_bytes, device, kv_cache)
    assert run is not None
    return InDram(dram_bytes=dram_bytes, tokens_per_s=run.tokens_per_s)


def budget_parts(spec: ModelSpec, format_name: FormatName, layout: Layout, plans: Plans) -> dict[str, int]:
    """Returns the uses of the DRAM budget and the bytes of each; they sum to it."""
    plan = plans.largest_plan
    arrays = [array for one in plans.plans for array in one.arrays]
    caches = {one.cache for one in plans.plans}
    joined = joined_bytes(layout.sections, format_name)
    bookkeeping = counted_bytes(spec, layout.sections, layout.flash_bytes // layout.page_bytes, arrays, caches, joined)
    planned = placed_parts(plan, layout.sections)
    pinned = sum(part.num_pinned * section.unit_bytes for part, section in planned)
    slots = sum(part.cache_slots * section.unit_bytes for part, section in planned)
    reads = not holds_everything(plan, layout.sections)
    coarse = sum(coarse_bytes(section.family, spec, section.format or format_name) for _, section in planned)
    parts = {
        "resident weights": plan.resident_bytes - coarse,
        "coarse planes": coarse,
        "predictors": plan.predictor_bytes,
        "KV cache": plan.kv_cache_bytes,
        "bookkeeping": bookkeeping,
        "read buffer": reads * plan.read_buffer_bytes,
        "preload buffer": reads * plan.preload_buffer_bytes,
        "pinned units": pinned,
        "cached units": slots,
    }
    parts["unused"] = plan.dram_budget_bytes - sum(parts.values())
    return {name: size for name, size in parts.items() if size}


def frequency_curves(activations: Activations, sparsity: Sparsity) -> tuple[FrequencyCurve, ...]:
    """Returns one curve per layer and family that was counted."""
    return tuple(
        FrequencyCurve(layer, statistics.family, np.sort(_counts(statistics))[::-1] / activations.num_tokens)
        for layer, statistics in _counted(activations, sparsity)
    )


def hot_overlaps(activations: Activations, sparsity: Sparsity) -> tuple[HotOverlap, ...]:
    """Returns one overlap per layer and family counted by context (ActiveFlow Fig. 6 shows this for channels)."""
    found: list[HotOverlap] = []
    for layer, statistics in _counted(activations, sparsity):
        arrays = load_arrays(statistics.arrays)
        if "context_counts" not in arrays:
            continue
        hot = _hottest(arrays["counts"])
        tasks = arrays.get("task_counts", np.empty((0, hot.size)))
        tasks = tasks[tasks.any(axis=1)]
        found.append(
            HotOverlap(
                layer=layer,
                family=statistics.family,
                context=_mean_overlap(hot, arrays["context_counts"]),
                task=_mean_overlap(hot, tasks) if len(tasks) else None,
            )
        )
    return tuple(found)


def _hottest(counts: np.ndarray) -> np.ndarray:
    """Returns bool [num_units], true for the HOT_UNITS most active units; on ties the lower unit counts as hotter."""
    hot = np.zeros(counts.size, bool)
    hot[np.argsort(-counts.astype(np.int64), kind="stable")[: max(1, round(HOT_UNITS * counts.size))]] = True
    return hot


def _mean_overlap(hot: np.ndarray, parts: np.ndarray) -> float:
    """Returns the mean, over rows of counts [num_parts, num_units], of the share of `hot` that is hottest there too."""
    return float(np.mean([(hot & _hottest(counts)).sum() / hot.sum() for counts in parts]))


def _counts(statistics: FamilyStatistics) -> np.ndarray:
    return load_arrays(statistics.arrays, "counts")["counts"]


def _counted(activations: Activations, sparsity: Sparsity) -> Iterator[tuple[int, FamilyStatistics]]:
    """Yields the families on flash whose density was known when they were counted."""
    families = {densities.family for densities in sparsity.densities}
    for entry in activations.layers:
        for statistics in entry.families:
            if statistics.family in families and statistics.density is not None:
                yield entry.layer, statistics


def structural_adjacency(activations: Activations, sparsity: Sparsity) -> dict[tuple[int, FamilyName], float]:
    """Returns the share of activations whose neighbour in the model's own order is active too; `order` improves it."""
    return {
        (layer, statistics.family): adjacent_share(load_arrays(statistics.arrays, "bits")["bits"])
        for layer, statistics in _counted(activations, sparsity)
    }
