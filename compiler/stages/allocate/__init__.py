"""allocate: divides the DRAM budget: density per layer and family, predictor sizes, and the bytes of every use.

With an open method the search (compiler/search) compares selectors, densities, formats and caches under one quality
floor, for each of several budgets; what it needs to know of the quality is measured as it goes (_finalists.py).
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coldpress.compiler.activity.sensitivity import SENSITIVITY_TOKENS
from coldpress.compiler.activity.unit_statistics import fit_all
from coldpress.compiler.candidates import AUTO, DEFAULT_FORMAT, caches_for
from coldpress.compiler.checkpoint.private import private_folder
from coldpress.compiler.checkpoint.shapes import why_shorter
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from coldpress.compiler.density_allocation import Rule
from coldpress.compiler.draft_passes import MODEL
from coldpress.compiler.io import Workspace
from coldpress.compiler.kept_codes import keeping, own_layers
from coldpress.compiler.quality.needs import needs_of_passes
from coldpress.compiler.search.budgets import BudgetChoice, choices
from coldpress.compiler.search.density import ALLOCATION_TOKENS, UNIFORM, AllocationInputs
from coldpress.compiler.search.drafts import DraftSavings, without
from coldpress.compiler.search.dram_shares import asked_budgets_of, divided, method_of
from coldpress.compiler.search.floor import Floor
from coldpress.compiler.search.replay import Replays, held_share
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.shared_settings import MAX_PPL_RATIO
from coldpress.compiler.stages.allocate._finalists import completed
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.plugins import load, load_class
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._mixed import coarsest
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.drafter import Drafter
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import Formats, HeadFormat, names_in, with_head
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Decision, Densities, Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
COMPARED_LOGIT_BYTES = 4 * 4 * 4
"""Memory per logit of a block while losses are compared: four variants in float32, with copies."""


def run(
    config: AllocateConfig,
    model: Model,
    activations: Activations,
    device: DeviceProfile,
    work: Workspace,
    corpus: Corpus | None = None,
    threads: int = 1,
    curves: Curves | None = None,
    drafter: Drafter | None = None,
) -> Sparsity:
    """Divides the budgets, each to the byte (compiler/search/dram_shares.py). A corpus is needed where
    density_allocation measures losses, and curves where the method is open.

    Raises:
        ColdpressError: if a setting does not go with the model, the device or the other settings.
        DoesNotFitError: if the budget cannot hold what must be in DRAM whatever the sparsity.
    """
    spec = model.spec
    if config.cache != AUTO:
        load_class("coldpress.runtime.cache", CachePolicy, config.cache)
    load("coldpress.runtime.quantization", Format, config.predictor_format)
    if config.context_length > spec.max_position_embeddings:
        promised = read_object(private_folder(model) / "config.json", MAX_CONFIG_BYTES)["max_position_embeddings"]
        raise ColdpressError(
            f"context_length {config.context_length} exceeds the {spec.max_position_embeddings} tokens of model "
            f"{model.name}{why_shorter(promised, spec)}; use a shorter one"
        )
    config, own = _with_own(config, model)
    budgets, found = tuple(asked_budgets_of(config, model, device).values()), None
    caches = caches_for(config.cache)
    inputs = AllocationInputs(model, activations, device, work, corpus, threads, curves, len(budgets), caches, drafter)
    if config.method == AUTO:
        found = completed(config, inputs, _floor(config, inputs), budgets)
        inputs = replace(inputs, curves=found)
        taken = choices(config, inputs, _floor(config, inputs), budgets)
    else:
        each = (config.model_copy(update={"dram_budget": budget}) for budget in budgets)
        taken = tuple(BudgetChoice(_with_draft(one, inputs, own), own) for one in each)
    largest, *smaller = _decisions(taken, inputs)
    sparsity = with_smaller(largest, smaller).model_copy(update={"curves": found})
    _log(sparsity)
    return sparsity


def _with_own(config: AllocateConfig, model: Model) -> tuple[AllocateConfig, Formats | None]:
    """Settles an open format where the method is given: a quantized file's own formats, else the default one. A draft
    model's head gets the format of its layers. Returns the settings and formats; None for one format."""
    if config.head_as_layers:
        head = HeadFormat(role=model.spec.head_role, format=coarsest(config.format))
        return config, with_head(keeping(model, config.format), head)
    if config.method == AUTO or config.format != AUTO:
        return config, None
    own = own_layers(model)
    if own is None or "fp16" in names_in(own):
        return config.model_copy(update={"format": DEFAULT_FORMAT}), None
    return config.model_copy(update={"format": coarsest(own)}), keeping(model, own)


def _with_draft(config: AllocateConfig, inputs: AllocationInputs, formats: Formats | None) -> AllocateConfig:
    def of(draft: str | None) -> Sparsity:
        return divided(config.model_copy(update={"draft": draft, "density_allocation": UNIFORM}), inputs, None, formats)

    if inputs.drafter is None:
        return config
    named, plain = config.draft, of(without(config.draft))
    found = DraftSavings(named, inputs).of(plain, Replays(inputs).of(plain).token_s, lambda: of(MODEL))
    return config.model_copy(update={"draft": MODEL if found else without(named)})


def _log(sparsity: Sparsity) -> None:
    budget = sparsity.budget
    LOG.info(
        "allocate: %s of %s bytes resident, %s predictors, %s KV cache, %s bookkeeping, %s buffers, %s for units",
        *(f"{value:,}" for value in (budget.resident_bytes, budget.dram_budget_bytes, budget.predictor_bytes)),
        *(f"{value:,}" for value in (budget.kv_cache_bytes, budget.bookkeeping_bytes)),
        *(f"{value:,}" for value in (budget.buffer_bytes, budget.cache_bytes)),
    )
    for densities in sparsity.densities:
        LOG.info("allocate: %s densities %s", densities.family, " ".join(f"{d:.3f}" for d in densities.per_layer))


def needs(build: "Build") -> StageNeeds:
    """Counts the larger need of quality passes and of sensitivities with hidden states before every layer. A rule that
    measures losses holds the hidden states of all variants twice, those of the whole model, and a block's logits."""
    settings, spec = build.settings["allocate"], build.model.spec
    rule = load("coldpress.compiler.density_allocation", Rule, settings["density_allocation"])
    variants = rule.num_variants(spec.num_hidden_layers, len(build.families))
    disk_bytes = 32 * spec.num_hidden_layers * build.layer_units(build.families)
    passes_bytes = build.PYTHON_BYTES
    if build.has("explore"):
        passes = needs_of_passes("allocate", build, build.methods)
        before_layers = 4 * max(SENSITIVITY_TOKENS, build.block_tokens) * spec.hidden_size * spec.num_hidden_layers
        backward = build.TORCH_BYTES + build.whole_layer_bytes + build.running_bytes(24, 24) + before_layers
        passes_bytes, disk_bytes = max(passes.ram_bytes, backward), disk_bytes + passes.disk_bytes
    if not variants:
        return StageNeeds(stage="allocate", ram_bytes=passes_bytes, disk_bytes=disk_bytes)
    tokens = min(max(ALLOCATION_TOKENS, build.block_tokens), build.num_tokens)
    hidden = (2 * variants + 1) * 4 * tokens * spec.hidden_size
    logits = COMPARED_LOGIT_BYTES * build.block_tokens * spec.vocab_size
    ram_bytes = build.TORCH_BYTES + build.layer_weights_bytes + build.running_bytes(8) + hidden + logits
    ram_bytes = max(ram_bytes, passes_bytes)
    return StageNeeds(stage="allocate", ram_bytes=ram_bytes, disk_bytes=disk_bytes)


def _decisions(taken: Sequence[BudgetChoice], inputs: AllocationInputs) -> Iterator[Sparsity]:
    known: dict[float, tuple[Densities, ...]] = {}
    for number, (config, formats, tried, front) in enumerate(taken):
        # a density that the user or the quality gives is divided among layers in the same way under all budgets
        found = divided(config, inputs, None if config.density is None else known.get(config.density), formats)
        if config.density is not None:
            known[config.density] = found.densities
        arrays = _fitted(found, inputs, f"selector-{found.budget.dram_budget_bytes}" if number else "selector")
        yield found.model_copy(update={"arrays": arrays, "tried": tried, "front": front})


def _floor(config: AllocateConfig, inputs: AllocationInputs) -> Floor:
    curves = inputs.curves
    if curves is None:
        raise ColdpressError("method=auto compares selectors by their quality curves; give --curves, from explore")
    if curves.weights_sha256 != inputs.model.weights_sha256:
        raise ColdpressError(
            f"the curves belong to weights {curves.weights_sha256[:12]}, the model has "
            f"{inputs.model.weights_sha256[:12]}; delete explore.json from the build folder and build again"
        )
    most = MAX_PPL_RATIO if config.max_ppl_ratio is None else config.max_ppl_ratio
    return Floor(curves, math.inf if most == "off" else most)


def _fitted(sparsity: Sparsity, inputs: AllocationInputs, key: str) -> ArrayFile | None:
    method = method_of(sparsity.method, sparsity.options, sparsity.formats, sparsity.layers_per_group, inputs)
    densities = {entry.family: entry.per_layer for entry in sparsity.densities}
    statistics = method.statistics(inputs, held_share(sparsity, inputs.model))
    fitted = fit_all(method.selector, method.options, densities, inputs.model.spec, statistics)
    arrays = {
        f"{layer}.{family}.{name}": array for (layer, family), found in fitted.items() for name, array in found.items()
    }
    return inputs.work.once(key, lambda: arrays) if arrays else None


def with_smaller(largest: Sparsity, smaller: Sequence[Sparsity]) -> Sparsity:
    """Adds smaller budgets to the largest; they share predictors, which are limited to what every budget holds."""
    every = (largest, *smaller)
    return largest.model_copy(
        update={
            "smaller": tuple(
                Decision(**{name: getattr(found, name) for name in Decision.model_fields}) for found in smaller
            ),
            "predictor_rank": tuple(map(min, zip(*(found.predictor_rank for found in every), strict=True))),
            "predictor_limit_bytes": min(found.predictor_limit_bytes for found in every),
        }
    )
