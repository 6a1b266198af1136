"""What a division of the budget is expected to cost, for the log: a first estimate, before anything is placed."""

import logging

import numpy as np

from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.io import load_arrays
from coldpress.schemas.activations import Activations
from coldpress.schemas.device import DeviceProfile, flash_seconds
from coldpress.schemas.families import num_units
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.sparsity import Sparsity

LOG = logging.getLogger(__name__)


def log_expected(spec: ModelSpec, activations: Activations, device: DeviceProfile, sparsity: Sparsity) -> None:
    """Says how the budget is divided and how fast that may be."""
    budget = sparsity.budget
    LOG.info(
        "allocate: %s of %s bytes resident, %s predictors, %s KV cache, %s bookkeeping, %s buffers, %s for units",
        *(f"{value:,}" for value in (budget.resident_bytes, budget.dram_budget_bytes, budget.predictor_bytes)),
        *(f"{value:,}" for value in (budget.kv_cache_bytes, budget.bookkeeping_bytes)),
        *(f"{value:,}" for value in (budget.buffer_bytes, budget.cache_bytes)),
    )
    for densities in sparsity.densities:
        LOG.info("allocate: %s densities %s", densities.family, " ".join(f"{d:.3f}" for d in densities.per_layer))
    hit_rate = _static_hit_rate(spec, activations, sparsity)
    seconds = _token_seconds(spec, device, sparsity, hit_rate)
    LOG.info("allocate: about %.1f tokens/s on %s at a hit rate of %.2f", 1 / seconds, device.name, hit_rate)


def _token_seconds(spec: ModelSpec, device: DeviceProfile, sparsity: Sparsity, hit_rate: float) -> float:
    """A first estimate, each layer's misses as one request of lone reads; the simulator knows better once there is an
    artifact."""
    budget, page_bytes = sparsity.budget, device.flash.page_bytes.value
    in_dram = budget.resident_bytes + budget.predictor_bytes + budget.kv_cache_bytes
    seconds = 0.0
    for entry in sparsity.densities:
        size = unit_bytes(entry.family, spec, sparsity.format)
        used = num_units(entry.family, spec) * np.array(entry.per_layer)
        missed, moved = np.ceil((1 - hit_rate) * used), -(-size // page_bytes) * page_bytes
        seconds += float(flash_seconds(device.flash, missed, missed * moved).sum())
        in_dram += int(size * used.sum())
    return seconds + in_dram / device.dram_bytes_per_s.value


def _static_hit_rate(spec: ModelSpec, activations: Activations, sparsity: Sparsity) -> float:
    """Share of activations by the most frequent units that fit the cache; without counts, those units' share of all."""
    counts: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    for entry in activations.layers:
        for densities in sparsity.densities:
            size, total = unit_bytes(densities.family, spec, sparsity.format), num_units(densities.family, spec)
            found = entry.family(densities.family)
            has_counts = found is not None and found.density is not None
            counts.append(load_arrays(found.arrays, "counts")["counts"] if found and has_counts else np.ones(total))
            sizes.append(np.full(total, size))
    count, size = np.concatenate(counts).astype(np.float64), np.concatenate(sizes)
    best = np.argsort(-count / size, kind="stable")
    kept = best[np.cumsum(size[best]) <= sparsity.budget.cache_bytes]
    return float(count[kept].sum() / max(1.0, count.sum()))
