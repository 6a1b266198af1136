"""Checks that a plan of a manifest fits the model, the tables and its own budget: arithmetic only.

`Facts` computes once per manifest what all plans share, so that time is linear in the manifest's length.
"""

from coldpress.runtime import plugins
from coldpress.runtime.artifact.contents import layout_bytes, predictor_tensors, resident_tensors
from coldpress.runtime.artifact.errors import PlanError, short
from coldpress.runtime.drafts import Draft
from coldpress.runtime.dram.budget import used_bytes
from coldpress.runtime.dram.kv_cache import kv_cache_bytes
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.sparsity import Selector, sees_others
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import unit_keys, used_share
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import DRAFT_MANIFEST, MANIFEST_FILE, Manifest


class Facts:
    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.families = [entry.family for entry in manifest.families]
        self.resident_bytes = layout_bytes(resident_tensors(manifest))
        self.predictor_bytes = layout_bytes(predictor_tensors(manifest))
        self.predicted = {entry.layer for entry in manifest.predictors}
        self.has_draft_model = any(entry.path == DRAFT_MANIFEST for entry in manifest.files)
        self.keys = unit_keys(self.families, manifest.model)
        sections = manifest.flash.sections
        self.num_units = {
            (layer, section.family): section.num_units for section in sections for layer in section.layers
        }


def check_plan(facts: Facts, plan: Plan, field: str) -> None:
    """Refuses a plan that contradicts the artifact or itself; `field` is its place in the manifest. Raises `PlanError`
    naming what is wrong."""

    def require(condition: bool, name: str, found: object, expected: object) -> None:
        if not condition:
            raise PlanError(MANIFEST_FILE, f"{field}.{name}", short(found), str(expected))

    manifest, spec, families = facts.manifest, facts.manifest.model, facts.families
    selector = plugins.load("coldpress.runtime.sparsity", Selector, plan.method)
    suits = set(families) <= set(selector.CHOOSES)
    require(suits, "method", plan.method, f"a method for the families {', '.join(families)}")
    needed = selector.NEEDS_PREDICTORS
    require(not needed or bool(manifest.predictors), "method", plan.method, "one without predictors")
    _check_arrays(facts, plan, field)
    longest = spec.max_position_embeddings
    require(plan.context_length <= longest, "context_length", plan.context_length, f"at most {longest}")
    resident = facts.resident_bytes
    require(plan.resident_bytes == resident, "resident_bytes", plan.resident_bytes, resident)
    predictors = facts.predictor_bytes if needed else 0
    require(plan.predictor_bytes == predictors, "predictor_bytes", plan.predictor_bytes, predictors)
    try:
        kv_cache = kv_cache_bytes(spec, plan.context_length, plan.kv_cache)
    except ColdpressError:
        expected = f"fp16, which takes as little for a head of {spec.head_dim} values"
        raise PlanError(MANIFEST_FILE, f"{field}.kv_cache", short(plan.kv_cache), expected) from None
    require(plan.kv_cache_bytes == kv_cache, "kv_cache_bytes", plan.kv_cache_bytes, kv_cache)
    page_bytes, unit_bytes = manifest.flash.page_bytes, max(section.unit_bytes for section in manifest.flash.sections)
    least = span_bytes(unit_bytes, page_bytes)
    fits = plan.read_buffer_bytes >= least and plan.read_buffer_bytes % page_bytes == 0
    require(fits, "read_buffer_bytes", plan.read_buffer_bytes, f"whole pages, at least {least}")
    buffer_bytes = plan.preload_buffer_bytes
    require(buffer_bytes % page_bytes == 0, "preload_buffer_bytes", buffer_bytes, f"whole pages of {page_bytes}")
    drafts = range(1, FEW_TOKENS) if plan.draft is not None else range(1)
    expected = f"{drafts[0]} to {drafts[-1]} with a draft" if plan.draft is not None else "0 without a draft"
    require(plan.draft_tokens in drafts, "draft_tokens", plan.draft_tokens, expected)
    needs_model = plan.draft is not None and plugins.load("coldpress.runtime.drafts", Draft, plan.draft).NEEDS_MODEL
    expected = f"more than 0 with the draft {plan.draft}" if needs_model else "0 without a draft model"
    require((plan.draft_bytes > 0) == needs_model, "draft_bytes", plan.draft_bytes, expected)
    expected = f"one without a model: there is no {DRAFT_MANIFEST}"
    require(not needs_model or facts.has_draft_model, "draft", plan.draft, expected)
    layers = 0 if plan.routing is None else spec.num_hidden_layers
    suits = len(plan.routing_strengths) == layers and all(0 <= one < float("inf") for one in plan.routing_strengths)
    expected = f"{layers} numbers of at least 0"
    require(suits, "routing_strengths", f"a list of {len(plan.routing_strengths)}", expected)
    require(plan.routing is None or spec.is_mixture, "routing", plan.routing, "none, since there are no experts")
    alone = plan.draft is None or not sees_others(plan)
    require(alone, "draft", plan.draft, f"none with this {plan.method}, which uses what earlier tokens left in DRAM")
    _check_parts(facts, plan, field)


def _check_arrays(facts: Facts, plan: Plan, field: str) -> None:
    """Requires for every layer and family what the plan's selector keeps, in its type and shape, and nothing else."""
    kept = plugins.load("coldpress.runtime.sparsity", Selector, plan.method).KEPT
    expected = {(*key, name): array for key in facts.keys for name, array in kept.items()}
    if sorted((array.layer, array.family, array.name) for array in plan.arrays) != sorted(expected):
        names = ", ".join(f"{name} {array}" for name, array in kept.items()) or "nothing"
        raise PlanError(
            MANIFEST_FILE, f"{field}.arrays", f"a list of {len(plan.arrays)}", f"{names} for every layer and family"
        )
    for index, array in enumerate(plan.arrays):
        wanted = expected[array.layer, array.family, array.name]
        shape = wanted.shape(facts.num_units[array.layer, array.family])
        if (array.dtype, array.shape) != (wanted.dtype, shape):
            found = f"{array.name} {array.dtype} {list(array.shape)}"
            raise PlanError(MANIFEST_FILE, f"{field}.arrays[{index}]", found, f"{wanted.dtype} {list(shape)}")


def _check_parts(facts: Facts, plan: Plan, field: str) -> None:
    needs_predictors = plugins.load("coldpress.runtime.sparsity", Selector, plan.method).NEEDS_PREDICTORS
    if [(part.layer, part.family) for part in plan.parts] != facts.keys:
        expected = "each layer with each of families, in order"
        raise PlanError(MANIFEST_FILE, f"{field}.parts", "a list of other parts", expected)
    for index, part in enumerate(plan.parts):
        whole = used_share(part.family, facts.manifest.model)
        if needs_predictors and part.density < whole and part.layer not in facts.predicted:
            expected = f"{whole:g}, since layer {part.layer} has no predictor"
            raise PlanError(MANIFEST_FILE, f"{field}.parts[{index}].density", str(part.density), expected)
        num_units = facts.num_units[part.layer, part.family]
        if part.num_pinned + part.cache_slots > num_units:
            total = f"{part.num_pinned} pinned units and {part.cache_slots} cache slots"
            raise PlanError(MANIFEST_FILE, f"{field}.parts[{index}]", total, f"at most {num_units}")
    used = used_bytes(facts.manifest, plan)
    if used > plan.dram_budget_bytes:
        raise PlanError(
            MANIFEST_FILE, f"{field}.dram_budget_bytes", str(plan.dram_budget_bytes), f"at least {used}, its parts"
        )
