"""allocate: divides the DRAM budget: density per layer and family, predictor sizes, and the bytes of every use.

Reads shapes, activation statistics and the device; returns a `Sparsity` whose budget adds up to the byte. The memory
equation is resident tensors + predictors + KV cache + bookkeeping + buffers + cache = budget (ActiveFlow 4.1, Eqs. 2
and 8, plus the other buffers of this runtime). The selector says where densities come from and what is fitted to them
(runtime/sparsity).
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from coldpress.compiler.activity.unit_statistics import fit_all
from coldpress.compiler.candidates import AUTO, DEFAULT_CACHE, candidates, own_cache_options, own_options
from coldpress.compiler.checkpoint.private import private_folder
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from coldpress.compiler.cost_model import (
    DramBudget,
    flash_bytes,
    kv_cache_bytes,
    predictor_bytes,
    read_units,
    resident_bytes,
    unit_bytes,
    weight_bytes,
    whole_rank,
)
from coldpress.compiler.dense_run import buffer_of
from coldpress.compiler.io import Workspace
from coldpress.compiler.sections import asked_budget_bytes, bookkeeping_bytes, make_sections
from coldpress.compiler.shared_settings import CacheSetting, MethodSetting, OverpredictionSetting, QualitySetting
from coldpress.compiler.stages.allocate import _densities
from coldpress.compiler.stages.allocate._auto import choose, token_seconds
from coldpress.compiler.stages.allocate._densities import Question
from coldpress.compiler.stages.allocate._ladder import with_ladder
from coldpress.compiler.stages.allocate._quality import Floor
from coldpress.compiler.stages.allocate._rules import UNIFORM, AllocationConfig, Inputs, Method, allocated
from coldpress.compiler.stages.allocate._task import Rule
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.plugins import load, load_class, options_of
from coldpress.runtime.quantization import Format
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import ArrayFile, Options, PositiveCount
from coldpress.schemas.config import Key
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.families import FamilyName, FormatName, used_share
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Budget, Densities, Sparsity, Tried

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
MIN_RANK = 8
"""Smallest rank; raised to fill a group of the predictors' format: 32 in 8 bits."""
COMPARED_LOGIT_BYTES = 4 * 4 * 4
"""Memory per logit of a block while losses are compared: four variants in float32, with copies."""
MAX_PPL_RATIO = 1.1
"""What `auto` may lose where nobody says."""
PREDICTOR_FREE_SHARE = 0.6
"""Predictors take at most this share of the DRAM that could hold units instead."""


class AllocateConfig(AllocationConfig, MethodSetting, CacheSetting, OverpredictionSetting, QualitySetting):
    """Settings of `allocate`."""

    ONLY_FOR_AUTO: ClassVar = ("max_ppl_ratio",)
    """Settings that only the choice of `auto` depends on."""

    format: Annotated[FormatName, Key(plugins="coldpress.runtime.quantization")] = Field(
        default="int4_group32", description="how weights are stored"
    )
    dram_budget: Annotated[DramBudget, Key(default="the device's")] = Field(
        description="bytes, 3GB, 1.5GiB, or a share such as 50% of weights and KV cache, plus fixed bookkeeping; "
        "several as 1GB,2GB,4GB give one artifact with a plan for each, of which the largest runs by default"
    )
    context_length: Annotated[PositiveCount, Key(default="the model's, at most 1024")] = Field(
        description="tokens that the KV cache holds; it is part of the budget"
    )
    kv_cache: Annotated[KvCacheFormat, Key()] = Field(
        default="fp16",
        description="how keys and values are kept; int8 takes 17/32 of the bytes of fp16, for a little quality",
    )
    density: Annotated[float | None, Key(default="derived from the budget; measured where zeros are exact")] = Field(
        default=None, gt=0, le=1, description="share of units used per token"
    )
    predictor_format: Annotated[FormatName, Key(plugins="coldpress.runtime.quantization")] = Field(
        default="int8_group32", description="how predictors are stored"
    )
    layers_per_group: Annotated[PositiveCount, Key()] = Field(
        default=1, description="consecutive layers whose units lie together on flash"
    )


class OverBudgetError(DoesNotFitError):
    """The DRAM budget cannot hold what a method needs before it caches any unit."""

    def __init__(self, text: str, needed_bytes: int) -> None:
        """`needed_bytes`: the bytes that the method needs."""
        super().__init__(text)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True)
class _Needs:
    """Bytes that do not depend on the number of cached units."""

    resident: int
    kv_cache: int
    bookkeeping: int
    predictors: int
    buffers: int


@dataclass(frozen=True)
class _PredictorSizes:
    """Limits for `size` and `predict`."""

    largest: tuple[int, ...]
    """Highest rank of each layer's predictor; 0 if it has none."""
    limit_bytes: int
    """Most bytes of all predictors together."""
    expected_bytes: int


def run(
    config: AllocateConfig,
    model: Model,
    activations: Activations,
    device: DeviceProfile,
    work: Workspace,
    corpus: Corpus | None = None,
    threads: int = 1,
    curves: Curves | None = None,
) -> Sparsity:
    """Divides the budget; `auto` picks the fastest candidate that keeps the quality, and dense unless another is
    clearly faster.

    A corpus is needed where density_allocation measures losses, and curves where the method is open.

    Raises:
        ColdpressError: if a setting does not go with the model, the device or the other settings.
        DoesNotFitError: if the budget cannot hold what must be in DRAM whatever the sparsity.
    """
    spec = model.spec
    if config.cache != AUTO:
        load_class("coldpress.runtime.cache", CachePolicy, config.cache)
    load("coldpress.runtime.quantization", Format, config.predictor_format)
    if config.context_length > spec.max_position_embeddings:
        raise ColdpressError(
            f"context_length {config.context_length} exceeds the {spec.max_position_embeddings} tokens of model "
            f"{model.name}{_why_shorter(model)}; use a shorter one"
        )
    budgets = _budgets_bytes(config, model, device)
    config = config.model_copy(update={"dram_budget": budgets[0]})
    inputs = Inputs(model, activations, device, work, corpus, threads, curves, len(budgets))
    sparsity = _fastest(config, inputs) if config.method == AUTO else _divided(config, inputs)
    sparsity = sparsity.model_copy(update={"arrays": _fitted(sparsity, inputs)})
    if budgets[1:]:
        chosen = _as_chosen(config, sparsity, inputs)
        sparsity = with_ladder(sparsity, [_rung(chosen, sparsity, budget, inputs) for budget in budgets[1:]])
    _log(sparsity, inputs, config.overprediction)
    return sparsity


def _log(sparsity: Sparsity, inputs: Inputs, overprediction: float) -> None:
    """Logs the division of the budget, and the speed to expect."""
    budget = sparsity.budget
    LOG.info(
        "allocate: %s of %s bytes resident, %s predictors, %s KV cache, %s bookkeeping, %s buffers, %s for units",
        *(f"{value:,}" for value in (budget.resident_bytes, budget.dram_budget_bytes, budget.predictor_bytes)),
        *(f"{value:,}" for value in (budget.kv_cache_bytes, budget.bookkeeping_bytes)),
        *(f"{value:,}" for value in (budget.buffer_bytes, budget.cache_bytes)),
    )
    for densities in sparsity.densities:
        LOG.info("allocate: %s densities %s", densities.family, " ".join(f"{d:.3f}" for d in densities.per_layer))
    token_s = next((entry.token_s for entry in sparsity.tried if entry.method == sparsity.method), None)
    if token_s is None:
        token_s = token_seconds(sparsity, inputs, overprediction)
    LOG.info("allocate: about %.1f tokens/s on %s", 1 / token_s, inputs.device.name)


def needs(build: "Build") -> StageNeeds:
    """Returns what losses take, if the rule measures them: hidden states of all variants twice and of the whole model,
    logits of a block."""
    settings, spec = build.settings["allocate"], build.model.spec
    rule = load("coldpress.compiler.stages.allocate", Rule, settings["density_allocation"])
    variants = rule.num_variants(spec.num_hidden_layers, len(build.families))
    disk_bytes = 32 * spec.num_hidden_layers * build.layer_units(build.families)
    if not variants:
        return StageNeeds(stage="allocate", ram_bytes=build.PYTHON_BYTES, disk_bytes=disk_bytes, runtime_s=600)
    tokens = min(max(settings["allocation_tokens"], build.block_tokens), build.num_tokens)
    hidden = (2 * variants + 1) * 4 * tokens * spec.hidden_size
    logits = COMPARED_LOGIT_BYTES * build.block_tokens * spec.vocab_size
    ram_bytes = build.TORCH_BYTES + build.layer_weights_bytes + build.running_bytes(8) + hidden + logits
    seconds = 600 + 32 * variants * build.forward_s(tokens)
    return StageNeeds(stage="allocate", ram_bytes=ram_bytes, disk_bytes=disk_bytes, runtime_s=seconds)


def _fastest(config: AllocateConfig, inputs: Inputs) -> Sparsity:
    """Compares the divisions of all candidates (_auto.py), each at the lowest density that keeps the quality; skips
    those that do not fit or lose too much.

    Candidates are compared with the same density in all layers; the allocation rule then runs for the chosen one only.

    Raises:
        DoesNotFitError: if none fits.
        ColdpressError: if there are no curves, or they belong to other weights.
    """
    floor = _floor(config, inputs)
    found: list[Sparsity] = []
    refusals: list[ColdpressError] = []
    skipped: list[Tried] = []
    configs: dict[str, AllocateConfig] = {}
    for method in candidates(inputs.model.spec, config.options):
        try:
            own = {"options": own_options(method, config.options), "density": _density_for(method, config, floor)}
            configs[method] = config.model_copy(update={"method": method, **own})
            found.append(_divided(configs[method].model_copy(update={"density_allocation": UNIFORM}), inputs))
        except ColdpressError as error:  # too large for the budget, loses too much, or leaves nothing out
            refusals.append(error)
            needed = error.needed_bytes if isinstance(error, OverBudgetError) else None
            skipped.append(Tried(method=method, skipped=str(error), needed_bytes=needed))
            LOG.info("allocate: %s is no candidate: %s", method, error)
    if not found:
        raise refusals[0]  # of the dense run, which needs nothing but DRAM
    chosen = choose(found, inputs, config.overprediction, floor)
    chosen = chosen.model_copy(update={"tried": (*chosen.tried, *skipped)})
    if config.density_allocation == UNIFORM:
        return chosen
    return _divided(configs[chosen.method], inputs).model_copy(update={"tried": chosen.tried})


def _floor(config: AllocateConfig, inputs: Inputs) -> Floor:
    """Returns the quality that candidates must keep."""
    curves = inputs.curves
    if curves is None:
        raise ColdpressError("method=auto compares selectors by their quality curves; give --curves, from explore")
    if curves.weights_sha256 != inputs.model.weights_sha256:
        raise ColdpressError(
            f"the curves belong to weights {curves.weights_sha256[:12]}, the model has "
            f"{inputs.model.weights_sha256[:12]}; delete explore.json from the build folder and build again"
        )
    most = MAX_PPL_RATIO if config.max_ppl_ratio is None else config.max_ppl_ratio
    return Floor(curves, math.inf if most == "off" else most, config.format)


def _density_for(method: str, config: AllocateConfig, floor: Floor) -> float | None:
    """Returns the density at which a candidate is judged: the user's, or the lowest that keeps the quality; None where
    a measurement decides.

    Raises:
        ColdpressError: saying why the candidate is none.
    """
    if (reason := floor.why_unexplored(method)) is not None:
        raise ColdpressError(reason)
    if floor.curves.curve(method) is None:
        return None  # every unit, or what zeros and predictors say
    if config.density is not None:
        ratio = floor.ratio(method, config.density)
        if ratio is not None and ratio > floor.max_ppl_ratio:
            raise ColdpressError(
                f"at density {config.density:g} it loses {ratio:.3f} times the perplexity, at most "
                f"{floor.max_ppl_ratio:g} may be lost"
            )
        return config.density
    if math.isinf(floor.max_ppl_ratio):
        return None  # from the budget
    density = floor.least_density(method)
    if density is None:
        raise ColdpressError(
            f"loses more than {floor.max_ppl_ratio:g} times the perplexity at every density below 1, of which "
            f"{config.format} takes {floor.format_ratio:.3f}"
        )
    return density


def _as_chosen(config: AllocateConfig, chosen: Sparsity, inputs: Inputs) -> AllocateConfig:
    """Returns the settings with which the chosen division was made."""
    if config.method != AUTO:
        return config
    density = _density_for(chosen.method, config, _floor(config, inputs))
    return config.model_copy(update={"method": chosen.method, "options": chosen.options, "density": density})


def _rung(config: AllocateConfig, largest: Sparsity, budget_bytes: int, inputs: Inputs) -> Sparsity:
    """Divides a smaller budget with the choice that was made for the largest.

    Raises:
        OverBudgetError: if it cannot hold what must be in DRAM.
    """
    config = config.model_copy(update={"dram_budget": budget_bytes})
    # a density that the user or the quality gives is the same for all budgets, and so is its division
    found = _divided(config, inputs, largest.densities if config.density is not None else None)
    return found.model_copy(update={"arrays": _fitted(found, inputs, f"selector-{budget_bytes}")})


def _divided(config: AllocateConfig, inputs: Inputs, densities: tuple[Densities, ...] | None = None) -> Sparsity:
    """Divides one budget with one method; `densities` are known already, or None."""
    model, device, spec = inputs.model, inputs.device, inputs.model.spec
    (budget,) = _budgets_bytes(config, model, device)
    method = _method_of(config.method, config.options, config.format, config.layers_per_group, inputs)
    bookkeeping = _bookkeeping_bytes(config, inputs, tuple(method.unit_bytes))
    if densities is None:
        shares = _shares(config, inputs, method, budget - bookkeeping)
    else:
        shares = {entry.family: entry.per_layer for entry in densities}
    resident = resident_bytes(model, tuple(shares), config.format)
    kv_cache = kv_cache_bytes(spec, config.context_length, config.kv_cache)
    free = budget - resident - kv_cache - bookkeeping
    sizes = _predictor_ranks(config, model, shares, free)
    predictors = sizes.expected_bytes
    cache = DEFAULT_CACHE if config.cache == AUTO else config.cache
    sparsity = Sparsity(
        method=config.method,
        options=config.options,
        format=config.format,
        context_length=config.context_length,
        kv_cache=config.kv_cache,
        densities=tuple(Densities(family=family, per_layer=values) for family, values in shares.items()),
        predictor_rank=sizes.largest,
        predictor_limit_bytes=sizes.limit_bytes,
        predictor_format=config.predictor_format if sizes.largest else None,
        budget=Budget(
            dram_budget_bytes=budget,
            resident_bytes=resident,
            predictor_bytes=predictors,
            kv_cache_bytes=kv_cache,
            bookkeeping_bytes=bookkeeping,
            buffer_bytes=0,
            cache_bytes=0,
        ),
        cache=cache,
        cache_options=own_cache_options(cache, config.cache_options) if config.cache == AUTO else config.cache_options,
        layers_per_group=config.layers_per_group,
    )
    buffers = buffer_of(model, sparsity, free - predictors, device)
    left = _cache_bytes(config, budget, _Needs(resident, kv_cache, bookkeeping, predictors, buffers))
    divided = sparsity.budget.model_copy(update={"buffer_bytes": buffers, "cache_bytes": left})
    return sparsity.model_copy(update={"budget": divided})


def _bookkeeping_bytes(config: AllocateConfig, inputs: Inputs, families: tuple[FamilyName, ...]) -> int:
    spec = inputs.model.spec
    sections = make_sections(spec, families, config.format, config.layers_per_group)
    page_bytes = inputs.device.flash.page_bytes.value
    return bookkeeping_bytes(spec, sections, config.method, page_bytes, inputs.num_plans)


def _budgets_bytes(config: AllocateConfig, model: Model, device: DeviceProfile) -> tuple[int, ...]:
    shape = (config.format, config.context_length, config.kv_cache)
    budgets = asked_budget_bytes(config.dram_budget, model, *shape, device.flash.page_bytes.value)
    if budgets[0] > device.dram_bytes.value:
        raise DoesNotFitError(
            f"a DRAM budget of {budgets[0]:,} bytes was asked for, device {device.name} has "
            f"{device.dram_bytes.value:,}; lower dram_budget"
        )
    return budgets


def _shares(config: AllocateConfig, inputs: Inputs, method: Method, m_max: int) -> dict[str, tuple[float, ...]]:
    model, activations = inputs.model, inputs.activations
    question = Question(
        method=config.method,
        families=tuple(method.unit_bytes),
        spec=model.spec,
        density=config.density,
        activations=activations,
        m_max=m_max,
        s_m=weight_bytes(model, config.format),
        allocate=lambda density: allocated(config, inputs, method, density),
    )
    return _densities.densities(question, method.selector.densities(activations.are_exact(question.families)))


def _method_of(name: str, options: Options, format_name: str, layers_per_group: int, inputs: Inputs) -> Method:
    selector = load("coldpress.runtime.sparsity", Selector, name)
    own, spec = options_of(selector, options), inputs.model.spec
    sizes = {family: unit_bytes(family, spec, format_name) for family in selector.families(spec, own)}
    reads = {family: read_units(inputs.device.flash, size, layers_per_group) for family, size in sizes.items()}
    return Method(name, selector, own, sizes, reads)


def _why_shorter(model: Model) -> str:
    """Explains why config.json promises more tokens than the model can be built for; empty if it does not."""
    promised = read_object(private_folder(model) / "config.json", MAX_CONFIG_BYTES)["max_position_embeddings"]
    if promised <= model.spec.max_position_embeddings:
        return ""
    return (
        f" (config.json has {promised}, but only longrope's short factors are supported, which "
        "hold up to original_max_position_embeddings)"
    )


def _fitted(sparsity: Sparsity, inputs: Inputs, key: str = "selector") -> ArrayFile | None:
    """Saves the selector's arrays for each family of each layer; returns None if it needs none."""
    method = _method_of(sparsity.method, sparsity.options, sparsity.format, sparsity.layers_per_group, inputs)
    densities = {entry.family: entry.per_layer for entry in sparsity.densities}
    held = sparsity.budget.cache_bytes / flash_bytes(sparsity.families, inputs.model.spec, sparsity.format)
    statistics = method.statistics(inputs, min(1.0, held))
    fitted = fit_all(method.selector, method.options, densities, inputs.model.spec, statistics)
    arrays = {
        f"{layer}.{family}.{name}": array for (layer, family), found in fitted.items() for name, array in found.items()
    }
    return inputs.work.once(key, lambda: arrays) if arrays else None


def _predictor_ranks(
    config: AllocateConfig, model: Model, densities: dict[FamilyName, tuple[float, ...]], free_bytes: int
) -> "_PredictorSizes":
    """Returns the limit and the expected bytes of predictors; all 0 if the method needs none.

    The expected size follows from each layer's density (PowerInfer Fig. 9), as far as all fit. One predictor may take
    all bytes that the others' smallest sizes leave, but never more parameters than the matrix whose sign it predicts:
    that matrix would be the better predictor. A layer that uses all its units has none. In a mixture of experts all
    counts are for the units that one token uses.

    Raises:
        ColdpressError: if every unit of every layer is used.
    """
    if not load("coldpress.runtime.sparsity", Selector, config.method).NEEDS_PREDICTORS:
        return _PredictorSizes((), 0, 0)
    spec, least = model.spec, whole_rank(MIN_RANK, config.predictor_format)
    ((family, shares),) = densities.items()
    per_layer = [share / used_share(family, spec) for share in shares]
    if min(per_layer) >= 1:
        raise ColdpressError(
            f"method {config.method} has nothing to predict: at a density of 1 every unit of {model.name} is used; use "
            "method=dense, or a lower density or dram_budget"
        )

    def stored(ranks: Iterable[int]) -> int:
        return sum(predictor_bytes(spec, rank, config.predictor_format) for rank in ranks)

    def wanted(density: float) -> int:
        return max(least, whole_rank(math.ceil(density * spec.hidden_size), config.predictor_format))

    predicted = sum(density < 1 for density in per_layer)
    smallest = stored([least] * predicted)
    limit = max(smallest, int(PREDICTOR_FREE_SHARE * free_bytes))
    alone = limit - stored([least] * (predicted - 1))
    inner = spec.intermediate_size * spec.num_experts_per_tok
    parity = spec.hidden_size * inner // (spec.hidden_size + inner)
    largest = least
    while largest + least <= parity and stored([largest + least]) <= alone:
        largest += least
    expected = min(limit, stored(min(largest, wanted(density)) for density in per_layer if density < 1))
    return _PredictorSizes(tuple(largest if density < 1 else 0 for density in per_layer), limit, expected)


def _cache_bytes(config: AllocateConfig, budget: int, needs: _Needs) -> int:
    """Returns the bytes that remain for units (Eqs. 2 and 8)."""
    needed = needs.resident + needs.kv_cache + needs.bookkeeping + needs.predictors + needs.buffers
    if needed > budget:
        raise OverBudgetError(
            f"a DRAM budget of {budget:,} bytes was asked for, {needed:,} are needed before any unit is cached: "
            f"{needs.resident:,} resident tensors in {config.format}, {needs.kv_cache:,} KV cache of "
            f"{config.context_length} tokens, {needs.bookkeeping:,} bookkeeping, {needs.predictors:,} predictors, "
            f"{needs.buffers:,} buffers; "
            "use a shorter context_length or a smaller format, or raise dram_budget",
            needed,
        )
    return budget - needed
