"""Computes the numbers of the report from records and activation counts; draws nothing."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.compiler.activity import expert_statistics
from coldpress.compiler.activity.expert_counts import used_experts
from coldpress.compiler.activity.packed_bits import adjacent_share
from coldpress.compiler.cost_model import slice_bytes, stored_format, tensor_bytes
from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.io import load_arrays
from coldpress.compiler.sections import Whole
from coldpress.runtime.dram.bookkeeping import counted_bytes
from coldpress.runtime.dram.budget import holds_everything
from coldpress.runtime.quantization._mixed import coarsest, format_fields
from coldpress.schemas.activations import Activations, FamilyStatistics
from coldpress.schemas.curves import Curves, MatrixLoss
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import (
    FamilyName,
    FormatName,
    Formats,
    dense_family,
    layer_format,
    matrix_formats,
    of_layers,
    unit_role,
)
from coldpress.schemas.layout import KvCacheFormat, Layout, Plan, placed_parts
from coldpress.schemas.metrics import Metrics, Verification, WholeInDram
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.package import Package
from coldpress.schemas.plans import Plans
from coldpress.schemas.sparsity import Sparsity

HOT_SHARE = 0.8
"""The share of activations that `hot_units` accounts for (PowerInfer 3.1 and Fig. 5 use the same)."""

HOT_UNITS = 0.2
"""The share of units that count as hottest where texts are compared."""

EXPERTS = "experts"
"""Stands for a family where whole experts are counted."""

LEAST_PAIRS = 10
"""Tokens that would use a pair of experts by chance; rarer pairs have noisy figures."""

ORIGINAL: FormatName = "fp16"
WHOLE_FORMATS: tuple[FormatName, ...] = (ORIGINAL, "int8_group32", "int4_group32")
"""Formats that the whole model in DRAM is shown in, the original's first."""

EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class FrequencyCurve:
    """Frequencies with which the units of one family of one layer are active, the highest first."""

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
    """The share of the hottest units of all text that are hottest in a part, too; near 1, one placement suits all."""

    layer: int
    family: str
    """A family, or EXPERTS."""
    context: float
    """Mean over contexts: consecutive tokens that the model saw together."""
    task: float | None
    """Mean over the tasks that the corpus names; None if it names none."""


def make_metrics(
    model: Model,
    device: DeviceProfile,
    sparsity: Sparsity,
    layout: Layout,
    plans: Plans,
    package: Package,
    found: Verification,
    curves: Curves | None = None,
) -> Metrics:
    run, plan = found.run, plans.largest_plan
    shared = Metrics.model_fields.keys() & Verification.model_fields.keys()
    return Metrics(
        model=model.name,
        device=device.name,
        method=sparsity.method,
        **format_fields(sparsity.formats),
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
        modelled_error=None if device.compute is None else device.modelled_error,
        in_dram=tuple(_in_dram(model, device, sparsity, plan, found, curves)),
        flash_s_per_token=run.modelled_flash_s / run.num_tokens,
        dram_s_per_token=run.modelled_dram_s / run.num_tokens,
        dram_parts=budget_parts(model, sparsity, layout, plans),
        tried=sparsity.tried,
        front=sparsity.front,
        provenance=package.provenance,
        **{name: getattr(found, name) for name in shared},
    )


def _in_dram(
    model: Model, device: DeviceProfile, sparsity: Sparsity, plan: Plan, found: Verification, curves: Curves | None
) -> Iterator[WholeInDram]:
    """Yields the whole model in DRAM: the original with an fp16 KV cache, other formats with the artifact's."""
    if model.relufication is not None or model.distillation is not None:
        curves = None  # the losses are of another model
    own = sparsity.formats
    for formats in WHOLE_FORMATS if own in WHOLE_FORMATS else (*WHOLE_FORMATS[:-1], own):
        kept = "fp16" if formats == ORIGINAL else plan.kv_cache
        whole = all_in_dram(model, formats, plan.context_length, kept, device)
        loss = None if curves is None else curves.format_loss(of_layers(formats), dense_family(model.spec))
        if formats == ORIGINAL:
            yield whole.model_copy(update={"ppl_ratio": 1.0})
        elif formats == own:
            yield whole.model_copy(update={"ppl_ratio": found.ppl_dense / found.ppl_source})
        elif loss is not None:
            yield whole.model_copy(update={"ppl_ratio": loss.ppl_ratio, "is_estimate": True})
        else:
            yield whole


def all_in_dram(
    model: Model, formats: Formats, context_length: int, kv_cache: KvCacheFormat, device: DeviceProfile
) -> WholeInDram:
    """Returns the DRAM that the whole model takes, and the speed of the dense run there, without its perplexity."""
    whole = Whole(model, formats, context_length, kv_cache, device.flash.page_bytes.value)
    (dram_bytes,) = whole.budgets("100%")
    run = dense_run(model, formats, context_length, dram_bytes, device, kv_cache)
    assert run is not None
    return WholeInDram(
        format=coarsest(formats),
        is_mixed=not isinstance(formats, str),
        dram_bytes=dram_bytes,
        fits=dram_bytes <= device.dram_bytes.value,
        dram_s=run.token_s,
        ppl_ratio=None,
    )


def budget_parts(model: Model, sparsity: Sparsity, layout: Layout, plans: Plans) -> dict[str, int]:
    """Returns the uses of the DRAM budget and the bytes of each; they sum to it."""
    plan, spec = plans.largest_plan, model.spec
    arrays = [array for one in plans.plans for array in one.arrays]
    caches = {one.cache for one in plans.plans}
    image = layout.sections, layout.tables, layout.flash_bytes, layout.page_bytes
    bookkeeping = counted_bytes(spec, *image, arrays, caches)
    planned = placed_parts(plan, layout.sections)
    pinned = sum(part.num_pinned * section.unit_bytes for part, section in planned)
    slots = sum(part.cache_slots * section.unit_bytes for part, section in planned)
    reads = not holds_everything(plan, layout.sections)
    by_row = {table.role: table.length_bytes for table in layout.tables}
    tensors = {role: model.tensors[role].shape for role in EMBEDDINGS if role in model.tensors and role not in by_row}
    embeddings = sum(tensor_bytes(role, shape, sparsity.formats) for role, shape in tensors.items())
    held = plan.resident_bytes + plan.predictor_bytes + plan.kv_cache_bytes + bookkeeping + pinned + slots
    holds_tables = not reads and held + sum(by_row.values()) <= plan.dram_budget_bytes
    parts = {  # in words of USES (compiler/stages/report/charts.py), which the page shows them by
        "embeddings and head": embeddings + holds_tables * sum(by_row.values()),
        "other resident weights": plan.resident_bytes - embeddings,
        "predictors": plan.predictor_bytes,
        "pinned units": pinned,
        "cached units": slots,
        "KV cache": plan.kv_cache_bytes,
        "read buffer": reads * plan.read_buffer_bytes,
        "preload buffer": reads * plan.preload_buffer_bytes,
        "bookkeeping": bookkeeping,
    }
    parts["unused"] = plan.dram_budget_bytes - sum(parts.values())
    return {name: size for name, size in parts.items() if size}


def frequency_curves(activations: Activations, sparsity: Sparsity) -> tuple[FrequencyCurve, ...]:
    found: list[FrequencyCurve] = []
    for layer, statistics in _counted(activations, sparsity):
        counts = load_arrays(statistics.arrays, "counts")["counts"]
        found.append(FrequencyCurve(layer, statistics.family, np.sort(counts)[::-1] / activations.num_tokens))
    return tuple(found)


def hot_overlaps(activations: Activations, sparsity: Sparsity) -> tuple[HotOverlap, ...]:
    """Returns an overlap per layer and family counted by context (ActiveFlow Fig. 6), and per layer with experts."""
    found: list[HotOverlap] = []
    for layer, name, arrays in _counts_by_text(activations, sparsity):
        if "context_counts" not in arrays:
            continue
        hot = _hottest(arrays["counts"])
        tasks = arrays.get("task_counts", np.empty((0, hot.size)))
        tasks = tasks[tasks.any(axis=1)]
        of_tasks = _mean_overlap(hot, tasks) if len(tasks) else None
        found.append(HotOverlap(layer, name, _mean_overlap(hot, arrays["context_counts"]), of_tasks))
    return tuple(found)


def _counts_by_text(
    activations: Activations, sparsity: Sparsity
) -> Iterator[tuple[int, str, Mapping[str, np.ndarray]]]:
    for layer, statistics in _counted(activations, sparsity):
        yield layer, statistics.family, load_arrays(statistics.arrays)
    for layer, used, arrays in _experts_used(activations):
        by_context = used.reshape(-1, activations.block_tokens or len(used), used.shape[1])
        yield layer, EXPERTS, arrays | {"counts": used.sum(axis=0), "context_counts": by_context.sum(axis=1)}


def _experts_used(activations: Activations) -> Iterator[tuple[int, np.ndarray, dict[str, np.ndarray]]]:
    """Yields which experts the tokens of a layer use, bool [num_tokens, num_experts], and the layer's arrays."""
    for entry in activations.layers:
        if entry.experts is not None:
            arrays = load_arrays(entry.experts.arrays)
            yield entry.layer, used_experts(entry.experts, activations.num_tokens), arrays


def most_together(activations: Activations) -> float | None:
    """Returns how many times as often as by independent choices the most attached pair of experts serves one token: the
    mean over layers of each layer's largest figure. Pairs of rare experts do not count. None without pairs."""
    found: list[float] = []
    for _, used, _ in _experts_used(activations):
        uses = used.mean(axis=0)
        by_chance = len(used) * np.outer(uses, uses)
        np.fill_diagonal(by_chance, 0)
        counted = by_chance >= LEAST_PAIRS
        if counted.any():
            found.append(float((expert_statistics.together(used)[counted] / by_chance[counted]).max()))
    return float(np.mean(found)) if found else None


def _hottest(counts: np.ndarray) -> np.ndarray:
    """Returns bool [num_units], true for the HOT_UNITS most active units; on ties the lower unit counts as hotter."""
    hot = np.zeros(counts.size, bool)
    hot[np.argsort(-counts.astype(np.int64), kind="stable")[: max(1, round(HOT_UNITS * counts.size))]] = True
    return hot


def _mean_overlap(hot: np.ndarray, parts: np.ndarray) -> float:
    """Returns the mean, over rows of counts [num_parts, num_units], of the share of `hot` that is hottest there too."""
    return float(np.mean([(hot & _hottest(counts)).sum() / hot.sum() for counts in parts]))


def _counted(activations: Activations, sparsity: Sparsity) -> Iterator[tuple[int, FamilyStatistics]]:
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


def matrix_bits(model: Model, formats: Formats) -> dict[str, dict[int, float]]:
    """Returns the bits of a weight by kind of matrix and layer, those of experts in the mean."""
    nbytes, values = (defaultdict[tuple[str, int], int](int) for _ in range(2))
    for role, source in model.tensors.items():
        matrix = unit_role(role, model.spec)
        if matrix is None or not role.endswith(".weight"):
            continue
        layer = int(role.split(".")[1])
        name = matrix_formats(layer_format(formats, layer)).get(matrix) or stored_format(role, formats)
        assert name is not None
        nbytes[_kind(matrix), layer] += source.shape[0] * slice_bytes(source.shape[1], name)
        values[_kind(matrix), layer] += math.prod(source.shape)
    found: dict[str, dict[int, float]] = {}
    for (kind, layer), total in nbytes.items():
        found.setdefault(kind, {})[layer] = 8 * total / values[kind, layer]
    return found


def expected_losses(losses: Sequence[MatrixLoss], spec: ModelSpec) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in losses:
        each = found.setdefault(_kind(one.role.split(".")[-2]), [0.0] * spec.num_hidden_layers)
        each[int(one.role.split(".")[1])] += one.mean_kld
    return found


def _kind(matrix: str) -> str:
    """Names a matrix; keys and values, which are small, together."""
    return "k and v" if matrix in ("k_proj", "v_proj") else matrix.removesuffix("_proj")
