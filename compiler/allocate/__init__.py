"""Decides what the DRAM budget buys: density per layer and family, predictor sizes, and the bytes of every use.

Reads shapes, activation statistics and the device; returns a `Sparsity` whose budget adds up to the byte. The memory
equation is resident tensors + predictors + KV cache + buffers + cache = budget (ActiveFlow 4.1, Eqs. 2 and 8, with
what this runtime keeps besides); where densities come from, and what is fitted to them, the selector says
(runtime/sparsity).
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from compiler._io import Workspace, load_arrays
from compiler._shared_settings import CacheSetting, MethodSetting
from compiler.activity.unit_statistics import fit_all
from compiler.allocate import _densities
from compiler.allocate._auto import choose
from compiler.allocate._densities import Question
from compiler.candidates import AUTO, candidates, own_options
from compiler.checkpoint.private import private_folder
from compiler.checkpoint.source_json import read_object
from compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from compiler.cost_model import (
    DramBudget,
    budget_bytes,
    dense_footprint_bytes,
    kv_cache_bytes,
    predictor_bytes,
    read_units,
    resident_bytes,
    unit_bytes,
    weight_bytes,
    whole_rank,
)
from compiler.dense_run import buffers_of
from runtime._plugins import load, options_of
from schemas.activations import Activations
from schemas.base import ArrayFile, PositiveCount
from schemas.config import Key
from schemas.device import DeviceProfile, flash_seconds
from schemas.errors import ColdpressError, DoesNotFitError
from schemas.families import FamilyName, FormatName, num_units
from schemas.model import Model, ModelSpec
from schemas.sparsity import Budget, Densities, Sparsity

LOG = logging.getLogger(__name__)
MIN_RANK = 8
"""Raised to what fills a group of the predictors' format: 32 in 8 bits."""
PREDICTOR_FREE_SHARE = 0.6
"""Predictors take at most this share of the DRAM that could hold units instead."""


class AllocateConfig(MethodSetting, CacheSetting):
    """Settings of `allocate`."""

    format: Annotated[FormatName, Key(plugins="runtime.quantization")] = Field(
        default="int4_group32", description="how weights are stored"
    )
    dram_budget: Annotated[DramBudget, Key(default="the device's")] = Field(
        description="bytes, 3GB, 1.5GiB, or a share of weights and KV cache such as 50%"
    )
    context_length: Annotated[PositiveCount, Key(default="the model's, at most 1024")] = Field(
        description="tokens that the KV cache holds; it is part of the budget"
    )
    density: Annotated[float | None, Key(default="derived from the budget; measured where zeros are exact")] = Field(
        default=None, gt=0, le=1, description="share of units used per token"
    )
    predictor_format: Annotated[FormatName, Key(plugins="runtime.quantization")] = Field(
        default="int8_group32", description="how predictors are stored"
    )
    layers_per_group: Annotated[PositiveCount, Key()] = Field(
        default=1, description="consecutive layers whose units lie together on flash"
    )


@dataclass(frozen=True)
class _Needs:
    """Bytes that do not depend on how many units are kept."""

    resident: int
    kv_cache: int
    predictors: int
    buffers: int


@dataclass(frozen=True)
class _PredictorSizes:
    """What `size` and `predict` may do."""

    largest: tuple[int, ...]
    """The rank that no layer's predictor exceeds, 0 where it has none."""
    limit_bytes: int
    """What all of them take at most."""
    expected_bytes: int


def run(
    config: AllocateConfig, model: Model, activations: Activations, device: DeviceProfile, work: Workspace
) -> Sparsity:
    """Divides the budget; with `auto` among the candidates for the fastest, dense unless another is clearly faster.

    Raises:
        ColdpressError: if a setting does not go with the model, the device or the other settings.
        DoesNotFitError: if the budget cannot hold what must be in DRAM whatever the sparsity.
    """
    spec = model.spec
    load("runtime.cache", config.cache)
    load("runtime.quantization", config.predictor_format)
    if config.context_length > spec.max_position_embeddings:
        raise ColdpressError(
            f"context_length {config.context_length} exceeds the {spec.max_position_embeddings} tokens of model "
            f"{model.name}{_why_shorter(model)}; use a shorter one"
        )
    if config.method == AUTO:
        sparsity = _fastest(config, model, activations, device)
    else:
        sparsity = _divided(config, model, activations, device)
    sparsity = sparsity.model_copy(update={"arrays": _fitted(sparsity, model, activations, device, work)})
    _log(spec, activations, device, sparsity)
    return sparsity


def _fastest(config: AllocateConfig, model: Model, activations: Activations, device: DeviceProfile) -> Sparsity:
    """The candidates' divisions held against each other (_auto.py); those that do not fit are left out.

    Raises:
        DoesNotFitError: if none fits.
    """
    found: list[Sparsity] = []
    refusals: list[ColdpressError] = []
    for method in candidates(model.spec):
        own = {"options": own_options(method, config.options), "density": _density_for(method, config.density)}
        chosen = config.model_copy(update={"method": method, **own})
        try:
            found.append(_divided(chosen, model, activations, device))
        except ColdpressError as error:  # too large for the budget, or with nothing to leave out
            refusals.append(error)
            LOG.info("allocate: %s is no candidate: %s", method, error)
    if not found:
        raise refusals[-1]
    return choose(found, model, activations, device)


def _density_for(method: str, density: float | None) -> float | None:
    """What the user asked for, where that is a choice."""
    return density if load("runtime.sparsity", method).densities(False) == "budget" else None


def _divided(config: AllocateConfig, model: Model, activations: Activations, device: DeviceProfile) -> Sparsity:
    """What one method makes of the budget."""
    spec = model.spec
    budget = _budget_bytes(config, model, device)
    shares = _shares(config, model, activations, budget)
    resident = resident_bytes(model, tuple(shares), config.format)
    kv_cache = kv_cache_bytes(spec, config.context_length)
    free = budget - resident - kv_cache
    sizes = _predictor_ranks(config, model, shares, free)
    predictors = sizes.expected_bytes
    sparsity = Sparsity(
        method=config.method,
        options=config.options,
        format=config.format,
        context_length=config.context_length,
        densities=tuple(Densities(family=family, per_layer=values) for family, values in shares.items()),
        predictor_rank=sizes.largest,
        predictor_limit_bytes=sizes.limit_bytes,
        predictor_format=config.predictor_format if sizes.largest else None,
        budget=Budget(
            dram_budget_bytes=budget,
            resident_bytes=resident,
            predictor_bytes=predictors,
            kv_cache_bytes=kv_cache,
            buffer_bytes=0,
            cache_bytes=0,
        ),
        layers_per_group=config.layers_per_group,
    )
    buffers = buffers_of(model, sparsity, free - predictors, device).total_bytes
    cache = _cache_bytes(config, budget, _Needs(resident, kv_cache, predictors, buffers))
    divided = sparsity.budget.model_copy(update={"buffer_bytes": buffers, "cache_bytes": cache})
    return sparsity.model_copy(update={"budget": divided})


def _budget_bytes(config: AllocateConfig, model: Model, device: DeviceProfile) -> int:
    dense = dense_footprint_bytes(model, config.format, config.context_length)
    budget = budget_bytes(config.dram_budget, dense)
    if budget > device.dram_bytes.value:
        raise DoesNotFitError(
            f"a DRAM budget of {budget:,} bytes was asked for, device {device.name} has {device.dram_bytes.value:,}; "
            "lower dram_budget"
        )
    return budget


def _shares(
    config: AllocateConfig, model: Model, activations: Activations, budget: int
) -> dict[str, tuple[float, ...]]:
    selector = load("runtime.sparsity", config.method)
    options = options_of(selector, config.options)
    source = selector.densities(activations.exact_zeros)
    question = Question(
        method=config.method,
        families=selector.families(model.spec, options),
        num_hidden_layers=model.spec.num_hidden_layers,
        density=config.density,
        activations=activations,
        m_max=budget,
        s_m=weight_bytes(model, config.format),
        divide=(lambda density: selector.divide(density, model.spec, options)) if source == "divided" else None,
    )
    return _densities.densities(question, source)


def _why_shorter(model: Model) -> str:
    """What to add where config.json promises more tokens than the model can be built for."""
    promised = read_object(private_folder(model) / "config.json", MAX_CONFIG_BYTES)["max_position_embeddings"]
    if promised <= model.spec.max_position_embeddings:
        return ""
    return (
        f" (config.json has {promised}, but of longrope only the short factors are supported, which "
        "hold up to original_max_position_embeddings)"
    )


def _fitted(
    sparsity: Sparsity, model: Model, activations: Activations, device: DeviceProfile, work: Workspace
) -> ArrayFile | None:
    """What the selector keeps for each family of each layer; None where it keeps nothing."""
    selector = load("runtime.sparsity", sparsity.method)
    options = options_of(selector, sparsity.options)
    densities = {entry.family: entry.per_layer for entry in sparsity.densities}
    costs = {
        family: read_units(device.flash, unit_bytes(family, model.spec, sparsity.format), sparsity.layers_per_group)
        for family in densities
    }
    fitted = fit_all(selector, options, densities, model, activations, costs)
    arrays = {
        f"{layer}.{family}.{name}": array for (layer, family), found in fitted.items() for name, array in found.items()
    }
    return work.once("selector", lambda: arrays) if arrays else None


def _predictor_ranks(
    config: AllocateConfig, model: Model, densities: dict[FamilyName, tuple[float, ...]], free_bytes: int
) -> "_PredictorSizes":
    """What predictors may take and are expected to; nothing where the method needs none.

    Expected is what each layer's density suggests (PowerInfer Fig. 9), as far as all of it fits. Any one may be as
    large as the others' least sizes leave room for, but has no more parameters than the matrix whose sign it predicts,
    which would be the better predictor. A layer all of whose units are used has none.

    Raises:
        ColdpressError: if every unit of every layer is used.
    """
    if not load("runtime.sparsity", config.method).NEEDS_PREDICTORS:
        return _PredictorSizes((), 0, 0)
    (per_layer,) = densities.values()
    if min(per_layer) >= 1:
        raise ColdpressError(
            f"method {config.method} has nothing to predict: at a density of 1 every unit of {model.name} is used; use "
            "method=dense, or a lower density or dram_budget"
        )
    spec, least = model.spec, whole_rank(MIN_RANK, config.predictor_format)

    def stored(ranks: Iterable[int]) -> int:
        return sum(predictor_bytes(spec, rank, config.predictor_format) for rank in ranks)

    def wanted(density: float) -> int:
        return max(least, whole_rank(math.ceil(density * spec.hidden_size), config.predictor_format))

    predicted = sum(density < 1 for density in per_layer)
    smallest = stored([least] * predicted)
    limit = max(smallest, int(PREDICTOR_FREE_SHARE * free_bytes))
    alone = limit - stored([least] * (predicted - 1))
    parity = spec.hidden_size * spec.intermediate_size // (spec.hidden_size + spec.intermediate_size)
    largest = least
    while largest + least <= parity and stored([largest + least]) <= alone:
        largest += least
    expected = min(limit, stored(min(largest, wanted(density)) for density in per_layer if density < 1))
    return _PredictorSizes(tuple(largest if density < 1 else 0 for density in per_layer), limit, expected)


def _cache_bytes(config: AllocateConfig, budget: int, needs: _Needs) -> int:
    """What is left for units (Eqs. 2 and 8)."""
    needed = needs.resident + needs.kv_cache + needs.predictors + needs.buffers
    if needed > budget:
        raise DoesNotFitError(
            f"a DRAM budget of {budget:,} bytes was asked for, {needed:,} are needed before any unit is kept: "
            f"{needs.resident:,} resident tensors in {config.format}, {needs.kv_cache:,} KV cache of "
            f"{config.context_length} tokens, {needs.predictors:,} predictors, {needs.buffers:,} buffers; "
            "use a shorter context_length or a smaller format, or raise dram_budget"
        )
    return budget - needed


# What the decision is expected to cost, for the log


def _log(spec: ModelSpec, activations: Activations, device: DeviceProfile, sparsity: Sparsity) -> None:
    budget = sparsity.budget
    LOG.info(
        "allocate: %s of %s bytes resident, %s predictors, %s KV cache, %s buffers, %s for units",
        *(f"{value:,}" for value in (budget.resident_bytes, budget.dram_budget_bytes, budget.predictor_bytes)),
        *(f"{value:,}" for value in (budget.kv_cache_bytes, budget.buffer_bytes, budget.cache_bytes)),
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
