"""Divides a DRAM budget for one method, format and cache by the memory equation of ActiveFlow 4.1, Eqs. 2 and 8:
resident tensors + predictors + KV cache + bookkeeping + buffers + cache = budget, to the byte.

A density comes from the user, the budget, or a measurement (exact zeros); the selector says which (runtime/sparsity:
`densities`). Sizes of predictors are limited before any is trained.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from coldpress.compiler.activity.packed_bits import counted
from coldpress.compiler.candidates import AUTO, DEFAULT_FORMAT, caches_for, own_cache_options
from coldpress.compiler.cost_model import (
    all_read_units,
    kv_cache_bytes,
    llm_sparsity,
    predictor_bytes,
    resident_bytes,
    unit_bytes,
    weight_bytes,
    whole_rank,
)
from coldpress.compiler.dense_run import buffers_of
from coldpress.compiler.draft_passes import MODEL
from coldpress.compiler.kept_codes import keeping
from coldpress.compiler.search.density import AllocationInputs, Method, allocated, over_layers
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.sections import Whole, bookkeeping_bytes, make_sections
from coldpress.compiler.shared_settings import DEFAULT_CACHE
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.quantization._mixed import coarsest, format_fields
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import Options
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.families import FamilyName, Formats, by_layer, layers_of, resident_share, used_share
from coldpress.schemas.layout import CacheName
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.sparsity import Budget, Densities, Sparsity

MIN_RANK = 8
"""Smallest rank; raised to fill a group of the predictors' format: 32 in 8 bits."""
PREDICTOR_FREE_SHARE = 0.6
"""Predictors take at most this share of the DRAM that could hold units instead."""
MIN_DENSITY = 0.05
"""Share of the MLP's weights on flash. No published method keeps a model usable below it; a budget that asks for less
gets slower, not sparser."""


def _shares(
    config: AllocateConfig, inputs: AllocationInputs, method: Method, m_max: int
) -> dict[str, tuple[float, ...]]:
    """Returns the density of every layer, per family; raises ColdpressError if the user's density does not go with the
    method, or the model has no exact zeros."""
    source = method.selector.densities(inputs.activations.are_exact(tuple(method.unit_bytes)))
    if source == "whole":
        return _whole(config, inputs.model.spec, method)
    if source == "measured":
        return _measured(config, inputs, method)
    density = _wanted(config, inputs.model, method, m_max) if config.density is None else config.density
    if source == "budget":
        return allocated(config, inputs, method, density)
    _need_exact_zeros(config, inputs)
    shares = allocated(config, inputs, method, density)
    return {family: tuple(map(min, share, _measured_family(inputs, family))) for family, share in shares.items()}


def _whole(config: AllocateConfig, spec: ModelSpec, method: Method) -> dict[str, tuple[float, ...]]:
    """Returns 1 everywhere; for experts, the share that a router picks for a token."""
    if config.density not in (None, 1):
        raise ColdpressError(
            f"density={config.density} was asked for, but method {config.method} uses every unit; leave density "
            "out, or use method=topk"
        )
    return {family: (used_share(family, spec),) * spec.num_hidden_layers for family in method.unit_bytes}


def _wanted(config: AllocateConfig, model: Model, method: Method, m_max: int) -> float:
    """Returns 1 - sp with sp = 1 - M_max / S_m, as a share of the MLP's weights; for a mixture, relative to the experts
    that a token uses.

    The paper's S_m is the whole model, all of it sparse. Here attention and embeddings stay dense in DRAM. Taking them
    out of both terms would leave the MLP a far lower density at the same budget. The budget holds either way, since
    units that do not fit are read again.
    """
    families, spec = tuple(method.unit_bytes), model.spec
    used = min(used_share(family, spec) for family in families)
    resident = resident_share(families, spec)
    least = resident + (1 - resident) * MIN_DENSITY
    return max(least, min(1.0, (1 - llm_sparsity(m_max, weight_bytes(model, config.format))) / used))


def _measured(config: AllocateConfig, inputs: AllocationInputs, method: Method) -> dict[str, tuple[float, ...]]:
    if config.density is not None:
        raise ColdpressError(
            f"density={config.density} was asked for, but method {config.method} uses exactly the units that are "
            "not zero; leave density out, or use method=topk"
        )
    _need_exact_zeros(config, inputs)
    return {family: _measured_family(inputs, family) for family in method.unit_bytes}


def _need_exact_zeros(config: AllocateConfig, inputs: AllocationInputs) -> None:
    if not inputs.activations.exact_zeros:
        raise ColdpressError(
            f"method {config.method} needs activations that are exactly zero (ReLU), and this model has none; "
            "use method=topk"
        )


def _measured_family(inputs: AllocationInputs, family: str) -> tuple[float, ...]:
    spec = inputs.model.spec
    found = {layer: counted(inputs.activations, layer, family).density for layer in layers_of(family, spec)}
    return over_layers(family, spec, {layer: share for layer, share in found.items() if share is not None})


@dataclass(frozen=True)
class PredictorSizes:
    largest: tuple[int, ...]
    """Highest rank of each layer's predictor; 0 if it has none."""
    limit_bytes: int
    expected_bytes: int


def predictor_sizes(
    config: AllocateConfig, model: Model, densities: dict[FamilyName, tuple[float, ...]], free_bytes: int
) -> PredictorSizes:
    """Returns the limit and the expected bytes of predictors; all 0 if the method needs none.

    The expected size follows from each layer's density (PowerInfer Fig. 9), as far as all fit. One predictor may take
    all bytes that the others' smallest sizes leave, but never more parameters than the matrix whose sign it predicts:
    that matrix would be the better predictor. A layer that uses all its units has none; raises ColdpressError if every
    layer does. In a mixture of experts all counts are for the units that one token uses.
    """
    if not load("coldpress.runtime.sparsity", Selector, config.method).NEEDS_PREDICTORS:
        return PredictorSizes((), 0, 0)
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
    return PredictorSizes(tuple(largest if density < 1 else 0 for density in per_layer), limit, expected)


def divided(
    config: AllocateConfig,
    inputs: AllocationInputs,
    densities: tuple[Densities, ...] | None = None,
    formats: Formats | None = None,
) -> Sparsity:
    """Divides one budget for one method. `densities` None derives them. `formats` of layers and matrices may differ,
    with `config.format` the coarsest; None gives all of them that format."""
    formats = by_layer(formats or keeping(inputs.model, config.format), inputs.model.spec.num_hidden_layers)
    model, device, spec = inputs.model, inputs.device, inputs.model.spec
    (dram_budget,) = asked_budgets_of(config, model, device, inputs.caches)
    method = method_of(config.method, config.options, formats, config.layers_per_group, inputs)
    bookkeeping = _bookkeeping_bytes(config, formats, inputs, tuple(method.unit_bytes))
    if densities is None:
        shares = _shares(config, inputs, method, dram_budget - bookkeeping)
    else:
        shares = {entry.family: entry.per_layer for entry in densities}
    resident = resident_bytes(model, tuple(shares), formats)
    kv_cache = kv_cache_bytes(spec, config.context_length, config.kv_cache_format)
    draft = inputs.drafter.dram_bytes if inputs.drafter and config.draft == MODEL else 0
    free = dram_budget - resident - kv_cache - bookkeeping - draft
    sizes = predictor_sizes(config, model, shares, free)
    predictors = sizes.expected_bytes
    cache = DEFAULT_CACHE if config.cache == AUTO else config.cache
    sparsity = Sparsity(
        method=config.method,
        options=config.options,
        **format_fields(formats),
        context_length=config.context_length,
        kv_cache=config.kv_cache_format,
        densities=tuple(Densities(family=family, per_layer=values) for family, values in shares.items()),
        predictor_rank=sizes.largest,
        predictor_limit_bytes=sizes.limit_bytes,
        predictor_format=config.predictor_format if sizes.largest else None,
        budget=Budget(
            dram_budget_bytes=dram_budget,
            resident_bytes=resident,
            predictor_bytes=predictors,
            kv_cache_bytes=kv_cache,
            bookkeeping_bytes=bookkeeping,
            buffer_bytes=0,
            cache_bytes=0,
            draft_bytes=draft,
        ),
        cache=cache,
        cache_options=own_cache_options(cache, config.cache_options) if config.cache == AUTO else config.cache_options,
        layers_per_group=config.layers_per_group,
    )
    buffers = sum(buffers_of(model, sparsity, free - predictors, device))
    division = sparsity.budget.model_copy(update={"buffer_bytes": buffers})
    left = dram_budget - division.held.num_bytes
    if left < 0:
        remedy = "use a shorter context_length or a smaller format, or raise dram_budget"
        words = f", in {config.format} with {config.context_length:,} tokens of context"
        raise division.held.over(dram_budget, remedy, by=words)
    return sparsity.model_copy(update={"budget": division.model_copy(update={"cache_bytes": left})})


def _bookkeeping_bytes(
    config: AllocateConfig, formats: Formats, inputs: AllocationInputs, families: tuple[FamilyName, ...]
) -> int:
    spec, page_bytes = inputs.model.spec, inputs.device.flash.page_bytes.value
    sections = make_sections(spec, families, formats, config.layers_per_group)
    caches = inputs.caches or caches_for(config.cache)
    return bookkeeping_bytes(spec, sections, config.format, config.method, caches, page_bytes, inputs.num_plans)


def asked_budgets_of(
    config: AllocateConfig, model: Model, device: DeviceProfile, caches: Collection[CacheName] = ()
) -> dict[int, int | str]:
    """Maps the bytes of each DRAM budget, the largest first, to the budget as it was written. A share such as `50%`
    stays text, since its bytes depend on the format: the default one while the format is open, later the candidate's.
    `caches`: all that the build may use, if `config` names only a candidate's.

    Raises:
        ColdpressError: if two of them are equal.
        DoesNotFitError: if the device has less DRAM.
    """
    format_name = DEFAULT_FORMAT if config.format == AUTO else config.format
    shape = (format_name, config.context_length, config.kv_cache_format, device.flash.page_bytes.value)
    found = Whole(model, *shape, caches or caches_for(config.cache)).budgets(config.dram_budget)
    largest = next(iter(found))
    if largest > device.dram_bytes.value:
        raise DoesNotFitError(
            f"a DRAM budget of {largest:,} bytes was asked for, device {device.name} has "
            f"{device.dram_bytes.value:,}; lower dram_budget"
        )
    return found


def method_of(name: str, options: Options, formats: Formats, layers_per_group: int, inputs: AllocationInputs) -> Method:
    selector = load("coldpress.runtime.sparsity", Selector, name)
    own, spec = options_of(selector, options), inputs.model.spec
    sizes = {family: unit_bytes(family, spec, coarsest(formats)) for family in selector.families(spec, own)}
    reads = all_read_units(inputs.device.flash, spec, sizes, formats, layers_per_group)
    return Method(selector, own, sizes, reads)
