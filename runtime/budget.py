"""One DRAM budget, divided: resident tensors, predictors, KV cache, read buffer and staging first, then pinned units,
and cache slots with all that is left. Pure arithmetic on the manifest's plans.

Slots are spread evenly over the layers (DIP, appendix A: no gain was found from spreading them otherwise) and, where
layers or families differ, by demand: density times bytes, the flash traffic of a token without a cache.
"""

from runtime import _plugins
from schemas.errors import DoesNotFitError
from schemas.layout import Plan, Section, SectionPlan
from schemas.manifest import MANIFEST_FILE, Manifest
from schemas.model import ModelSpec

KV_VALUE_BYTES = 2
"""Keys and values are kept in fp16."""


def kv_cache_bytes(spec: ModelSpec, context_length: int) -> int:
    """Bytes of the keys and values of `context_length` tokens in all layers."""
    return 2 * KV_VALUE_BYTES * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim * context_length


def fixed_bytes(manifest: Manifest, plan: Plan) -> int:
    """DRAM that a plan needs before any unit is kept: resident, predictors, KV cache, read buffer, staging slots."""
    unit_bytes = {entry.family: entry.unit_bytes for entry in manifest.families}
    staging = sum(slots * unit_bytes[family] for family, slots in plan.staging_slots)
    return plan.resident_bytes + plan.predictor_bytes + plan.kv_cache_bytes + plan.read_buffer_bytes + staging


def used_bytes(manifest: Manifest, plan: Plan) -> int:
    """DRAM that a plan needs: the fixed part, and the slots of pinned and cached units."""
    unit_bytes = {entry.family: entry.unit_bytes for entry in manifest.families}
    slots = sum((part.num_pinned + part.cache_slots) * unit_bytes[part.family] for part in plan.sections)
    return fixed_bytes(manifest, plan) + slots


def choose_plan(manifest: Manifest, dram_budget_bytes: int | None = None) -> Plan:
    """The plan to run with.

    Without a budget, the plan with the largest one. With a budget, the largest plan that fits, else the smallest one;
    its pinned units and cache slots are then cut or extended to what the budget leaves.

    Raises:
        DoesNotFitError: if the budget cannot hold what must always be in DRAM; the text gives both numbers.
    """
    by_size = sorted(manifest.plans, key=lambda plan: (plan.dram_budget_bytes, plan.name))
    if dram_budget_bytes is None:
        return by_size[-1]
    fitting = [plan for plan in by_size if plan.dram_budget_bytes <= dram_budget_bytes]
    return refit(manifest, fitting[-1] if fitting else by_size[0], dram_budget_bytes)


def refit(manifest: Manifest, plan: Plan, dram_budget_bytes: int) -> Plan:
    """`plan` under another budget: pinned units first, then cache slots with what is left.

    Raises:
        DoesNotFitError: if the fixed part does not fit.
    """
    fixed = fixed_bytes(manifest, plan)
    if fixed > dram_budget_bytes:
        raise DoesNotFitError(
            f"{MANIFEST_FILE}: plan '{plan.name}' needs {fixed} bytes of DRAM before any unit is cached (resident "
            f"{plan.resident_bytes}, predictors {plan.predictor_bytes}, KV cache {plan.kv_cache_bytes}, buffers the "
            f"rest), the budget is {dram_budget_bytes}; raise it, or build for a shorter context or a smaller format"
        )
    sections = manifest.flash.sections
    pinned = _pinned(plan, sections, dram_budget_bytes - fixed)
    taken = sum(count * section.unit_bytes for count, section in zip(pinned, sections, strict=True))
    slots = cache_slots(plan, sections, pinned, dram_budget_bytes - fixed - taken)
    parts = tuple(
        part.model_copy(update={"num_pinned": num_pinned, "cache_slots": num_slots})
        for part, num_pinned, num_slots in zip(plan.sections, pinned, slots, strict=True)
    )
    return plan.model_copy(update={"dram_budget_bytes": dram_budget_bytes, "sections": parts})


def _pinned(plan: Plan, sections: tuple[Section, ...], room: int) -> list[int]:
    """Pinned units per section: the plan's where they fit, else the same share of each section's."""
    pairs = list(zip(plan.sections, sections, strict=True))
    wanted = sum(part.num_pinned * section.unit_bytes for part, section in pairs)
    if wanted <= room:
        return [part.num_pinned for part, _ in pairs]
    return [part.num_pinned * room // wanted for part, _ in pairs]


def cache_slots(plan: Plan, sections: tuple[Section, ...], pinned: list[int], room: int) -> list[int]:
    """Cache slots per section: `room` bytes by demand, at most a section's units; 0 where the policy admits nothing."""
    slots = [0] * len(sections)
    if not _plugins.load("runtime.cache", plan.cache).Cache.admits:
        return slots
    limits = [section.num_units - count for section, count in zip(sections, pinned, strict=True)]
    open_ones = [index for index, limit in enumerate(limits) if limit]
    while open_ones:
        before = list(slots)
        demand = {index: _demand(plan.sections[index], sections[index]) for index in open_ones}
        total, left = sum(demand.values()), room
        for index in open_ones:
            share = left * demand[index] // total
            slots[index] += min(limits[index] - slots[index], share // sections[index].unit_bytes)
        room -= sum(
            (now - then) * section.unit_bytes for now, then, section in zip(slots, before, sections, strict=True)
        )
        open_ones = [index for index in open_ones if slots[index] < limits[index]]
        if slots == before:
            break
    return slots


def _demand(part: SectionPlan, section: Section) -> int:
    """Weight of a section, exact: parts per million of density times bytes; every section counts for something."""
    return max(1, round(part.density * 1_000_000)) * section.length_bytes
