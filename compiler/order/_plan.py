"""How many units the plan's dynamic cache will hold: what `layout` will compute from the same numbers."""

from collections.abc import Mapping

from runtime.budget import cache_slots
from schemas.families import FamilyName
from schemas.layout import Plan, Section, SectionPlan
from schemas.placement import Placement
from schemas.sparsity import Sparsity


def slots_of(
    cache: str, sparsity: Sparsity, placement: Placement, sizes: Mapping[FamilyName, tuple[int, int]]
) -> dict[tuple[int, FamilyName], int]:
    """Cache slots per layer and family: the DRAM for units that is not pinned, divided by demand (runtime/budget.py).

    Args:
        cache: The policy, a file of runtime/cache; one that admits nothing has no slots.
        sparsity: Its budget counts the DRAM for units.
        placement: What of it is pinned.
        sizes: Per family (units in a layer, bytes of a unit).
    """
    entries = placement.layers
    sections = tuple(
        Section(
            layer=entry.layer,
            family=entry.family,
            offset_bytes=0,
            num_units=sizes[entry.family][0],
            unit_bytes=sizes[entry.family][1],
        )
        for entry in entries
    )
    parts = tuple(
        SectionPlan(
            layer=entry.layer,
            family=entry.family,
            density=sparsity.density(entry.family, entry.layer),
            num_pinned=entry.num_pinned,
            cache_slots=0,
        )
        for entry in entries
    )
    pinned = [entry.num_pinned for entry in entries]
    taken = sum(count * section.unit_bytes for count, section in zip(pinned, sections, strict=True))
    room = max(0, sparsity.budget.cache_bytes - taken)
    slots = cache_slots(_plan(cache, sparsity, parts), sections, pinned, room)
    return {(entry.layer, entry.family): count for entry, count in zip(entries, slots, strict=True)}


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
