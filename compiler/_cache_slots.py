"""How many units the plan's dynamic cache will hold: what `layout` will compute, for stages that come before it."""

from collections.abc import Sequence

from runtime.budget import cache_slots
from schemas.families import FamilyName
from schemas.layout import Plan, Section, SectionPlan
from schemas.sparsity import Sparsity


def section_of(layer: int, family: FamilyName, num_units: int, unit_bytes: int) -> Section:
    """A section that has no place on flash yet."""
    return Section(layer=layer, family=family, offset_bytes=0, num_units=num_units, unit_bytes=unit_bytes)


def planned_slots(
    cache: str, sparsity: Sparsity, sections: tuple[Section, ...], num_pinned: Sequence[int]
) -> list[int]:
    """Cache slots per section: the DRAM for units that is not pinned, divided by demand (runtime/budget.py).

    Args:
        cache: The policy, a file of runtime/cache; one that admits nothing has no slots.
        sparsity: Its budget counts the DRAM for units.
        sections: Of all layers.
        num_pinned: Pinned units of each.
    """
    parts = tuple(
        SectionPlan(
            layer=section.layer,
            family=section.family,
            density=sparsity.density(section.family, section.layer),
            num_pinned=count,
            cache_slots=0,
        )
        for section, count in zip(sections, num_pinned, strict=True)
    )
    taken = sum(count * section.unit_bytes for count, section in zip(num_pinned, sections, strict=True))
    room = max(0, sparsity.budget.cache_bytes - taken)
    return cache_slots(_plan(cache, sparsity, parts), sections, list(num_pinned), room)


def _plan(cache: str, sparsity: Sparsity, parts: tuple[SectionPlan, ...]) -> Plan:
    """A plan without reads: only its policy and its sections matter to the division."""
    budget = sparsity.budget
    return Plan(
        name="default",
        method=sparsity.method,
        cache=cache,
        dram_budget_bytes=budget.dram_budget_bytes,
        context_length=sparsity.context_length,
        resident_bytes=budget.resident_bytes,
        predictor_bytes=budget.predictor_bytes,
        kv_cache_bytes=budget.kv_cache_bytes,
        read_buffer_bytes=max(1, budget.buffer_bytes),
        staging_slots=(),
        collapse_gap_bytes=0,
        queue_depth=1,
        sections=parts,
    )
