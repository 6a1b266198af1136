"""Divides one DRAM budget: resident tensors, predictors, KV cache, buffers and bookkeeping come first, then pinned
units, and cache slots get all that is left. Pure arithmetic on the manifest's plans.

Slots are spread evenly over the layers (DIP, appendix A, found no gain from any other spread) or, where layers or
families differ, by demand: density times bytes, the flash traffic of a token without a cache.

With room for all units none is ever read, so that a plan needs no buffers: `holds_everything` is the one rule. Matrices
that are read by row are loaded where they fit, too (`holds_tables`). Such a plan keeps its division into pinned units
and slots, so that a smaller budget is divided as before; `as_run` gives the plan that the store follows.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from coldpress.runtime import plugins
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.dram.bookkeeping import bookkeeping_bytes
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.layout import Plan, Section, by_budget, placed_parts
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.memory import Held

WITHOUT_DRAFT: Mapping[str, Any] = {"draft": None, "draft_tokens": 0, "draft_bytes": 0, "draft_certainty": 1.0}
"""The fields of a plan that drafts nothing."""


class Claim(NamedTuple):
    density: float
    """Share of its units that a token uses."""
    num_units: int
    unit_bytes: int
    num_pinned: int


def fixed_bytes(manifest: Manifest, plan: Plan) -> int:
    """Returns the DRAM that a plan needs besides units: resident tensors, predictors, KV cache, bookkeeping, buffers. A
    plan that never reads needs no buffers."""
    reads = not holds_everything(plan, manifest.flash.sections)
    return _unread(manifest, plan).num_bytes + (_reading_bytes(plan) if reads else 0)


def least_budget_bytes(manifest: Manifest, plan: Plan) -> int:
    """Returns the smallest budget that `refit` can divide for a plan. It is the smaller of two: buffers and no unit in
    DRAM, or all units in DRAM and no buffers."""
    return min(_unread(manifest, plan).num_bytes + _reading_bytes(plan), units_whole_bytes(manifest, plan))


def used_bytes(manifest: Manifest, plan: Plan) -> int:
    """Returns the DRAM that a plan needs: the fixed part, and the slots of pinned and cached units."""
    placed = placed_parts(plan, manifest.flash.sections)
    slots = sum((part.num_pinned + part.cache_slots) * section.unit_bytes for part, section in placed)
    tables = table_bytes(manifest) if holds_tables(manifest, plan) else 0
    return fixed_bytes(manifest, plan) + slots + tables


def whole_bytes(manifest: Manifest, plan: Plan) -> int:
    """Returns the DRAM with which a plan holds every unit and every table, and reads nothing."""
    return units_whole_bytes(manifest, plan) + table_bytes(manifest)


def units_whole_bytes(manifest: Manifest, plan: Plan) -> int:
    """Returns the DRAM with which a plan holds every unit, and no table; a draft model is then of no use."""
    units = (section.num_units * section.unit_bytes for _, section in placed_parts(plan, manifest.flash.sections))
    return _unread(manifest, without_draft(plan)).num_bytes + sum(units)


def table_bytes(manifest: Manifest) -> int:
    return sum(table.length_bytes for table in manifest.flash.tables)


def holds_tables(manifest: Manifest, plan: Plan) -> bool:
    """Returns whether a plan loads the matrices that are read by row, too: if everything fits."""
    holds_units = holds_everything(plan, manifest.flash.sections)
    return holds_units and whole_bytes(manifest, plan) <= plan.dram_budget_bytes


def holds_everything(plan: Plan, sections: Iterable[Section]) -> bool:
    """Returns whether a plan has room for every unit, so that no unit is read after the session has opened."""
    return all(
        part.num_pinned + part.cache_slots == section.num_units for part, section in placed_parts(plan, sections)
    )


def as_run(manifest: Manifest, plan: Plan) -> Plan:
    """Returns the plan that the store follows: with every unit pinned, if the plan has room for all."""
    if not holds_everything(plan, manifest.flash.sections):
        return plan
    parts = (
        part.model_copy(update={"num_pinned": section.num_units, "cache_slots": 0})
        for part, section in placed_parts(plan, manifest.flash.sections)
    )
    return plan.model_copy(update={"parts": tuple(parts)})


def choose_plan(manifest: Manifest, dram_budget_bytes: int | None = None, plans: Sequence[Plan] | None = None) -> Plan:
    """Chooses the plan to run with, from the manifest's plans or from `plans`, which were made from them.

    Without a budget, it takes the plan with the largest budget. With a budget, it takes the largest plan that fits,
    else the smallest one, and then cuts or extends pinned units and cache slots to what the budget leaves. A budget
    with room for everything holds everything. Raises `DoesNotFitError` if the budget cannot hold what must always be in
    DRAM; the text gives both numbers.
    """
    by_size = by_budget(manifest.plans if plans is None else plans)
    if dram_budget_bytes is None:
        plan = by_size[-1]
        fits = units_whole_bytes(manifest, plan) <= plan.dram_budget_bytes
        return refit(manifest, plan, plan.dram_budget_bytes) if fits else plan
    fitting = [plan for plan in by_size if plan.dram_budget_bytes <= dram_budget_bytes]
    return refit(manifest, fitting[-1] if fitting else by_size[0], dram_budget_bytes)


def refit(manifest: Manifest, plan: Plan, dram_budget_bytes: int) -> Plan:
    """Divides another budget for `plan`: first pinned units, then cache slots in the remaining bytes.

    A budget with room for every unit gives each unit a slot, and counts no buffers; a draft model, which could save
    nothing there, leaves it its DRAM. A cache policy that admits nothing has no use for slots: it pins further units
    with the bytes of the plan's slots, and with the bytes by which the budget exceeds the plan's. Raises
    `OverBudgetError` if the fixed part does not fit.
    """
    if units_whole_bytes(manifest, plan) <= dram_budget_bytes:
        plan = without_draft(plan)
    claims = _claims(manifest, plan)
    held = _unread(manifest, plan)
    free_bytes = dram_budget_bytes - held.num_bytes
    room_bytes = free_bytes - _reading_bytes(plan)
    if _all_bytes(claims) <= free_bytes:
        pins, slots = [0] * len(claims), [claim.num_units - claim.num_pinned for claim in claims]
    elif room_bytes < 0:
        remedy = "raise it, or build for a shorter context or a smaller format"
        raise held._replace(buffers=_reading_bytes(plan)).over(dram_budget_bytes, remedy, by=f", by {plan.title}")
    else:
        more_bytes = max(0, dram_budget_bytes - plan.dram_budget_bytes)
        claims = _pinned(claims, room_bytes)
        if _admits(plan.cache):
            pins, slots = [0] * len(claims), _divided(claims, room_bytes)
        else:
            spent_bytes = used_bytes(manifest, plan) - fixed_bytes(manifest, plan)
            pins, slots = _divided(claims, min(room_bytes, spent_bytes + more_bytes)), [0] * len(claims)
    parts = tuple(
        part.model_copy(update={"num_pinned": claim.num_pinned + num_more, "cache_slots": num_slots})
        for part, claim, num_more, num_slots in zip(plan.parts, claims, pins, slots, strict=True)
    )
    return plan.model_copy(update={"dram_budget_bytes": dram_budget_bytes, "parts": parts})


def without_draft(plan: Plan) -> Plan:
    return plan.model_copy(update=WITHOUT_DRAFT) if plan.draft_bytes else plan


def with_kv_cache(manifest: Manifest, plan: Plan, kv_cache_bytes: int, dram_budget_bytes: int) -> Plan:
    """Returns `plan` with another size of the KV cache; within the budget, a larger one takes room from units. Raises
    `DoesNotFitError` if the budget cannot hold the KV cache."""
    changed = plan.model_copy(update={"kv_cache_bytes": kv_cache_bytes})
    missing = least_budget_bytes(manifest, changed) - dram_budget_bytes
    if missing > 0:
        raise DoesNotFitError(
            f"the KV cache takes {kv_cache_bytes} bytes, {plan.title} leaves {kv_cache_bytes - missing} of "
            f"{dram_budget_bytes} bytes of DRAM for it; ask for fewer sequences or tokens, or give a larger DRAM budget"
        )
    return refit(manifest, changed, dram_budget_bytes)


def cache_slots(cache: str, claims: Sequence[Claim], free_bytes: int, reading_bytes: int = 0) -> list[int]:
    """Returns the number of cache slots of each claim, without its pinned units.

    A `cache` that admits nothing gets no slots, unless all units have room. `free_bytes` is DRAM for units, pinned ones
    included, and for buffers; `reading_bytes` the part of it that buffers take if not all units have room.
    """
    if _all_bytes(claims) <= free_bytes or _admits(cache):
        return units_with_room(claims, free_bytes, reading_bytes)
    return [0] * len(claims)


def units_with_room(claims: Sequence[Claim], free_bytes: int, reading_bytes: int = 0) -> list[int]:
    """Returns how many units of each claim DRAM holds beyond its pinned ones; see `cache_slots`."""
    if _all_bytes(claims) <= free_bytes:
        return [claim.num_units - claim.num_pinned for claim in claims]
    return _divided(claims, free_bytes - reading_bytes)


def _unread(manifest: Manifest, plan: Plan) -> Held:
    besides = plan.resident_bytes, plan.predictor_bytes, plan.kv_cache_bytes, bookkeeping_bytes(manifest)
    return Held(*besides, draft=plan.draft_bytes)


def _reading_bytes(plan: Plan) -> int:
    return plan.read_buffer_bytes + plan.preload_buffer_bytes


def _all_bytes(claims: Sequence[Claim]) -> int:
    return sum(claim.num_units * claim.unit_bytes for claim in claims)


def _admits(cache: str) -> bool:
    return plugins.load_class("coldpress.runtime.cache", CachePolicy, cache).admits


def _claims(manifest: Manifest, plan: Plan) -> list[Claim]:
    return [
        Claim(part.density, section.num_units, section.unit_bytes, part.num_pinned)
        for part, section in placed_parts(plan, manifest.flash.sections)
    ]


def _pinned(claims: list[Claim], room_bytes: int) -> list[Claim]:
    """Returns the claims with pinned units that fit: the plan's, else the same share of each claim's, rounded down."""
    wanted = sum(claim.num_pinned * claim.unit_bytes for claim in claims)
    if wanted <= room_bytes:
        return claims
    return [claim._replace(num_pinned=claim.num_pinned * room_bytes // wanted) for claim in claims]


def _divided(claims: Sequence[Claim], room_bytes: int) -> list[int]:
    """Divides the room that pinned units leave, by demand; returns further units per claim, at most all of its units. A
    claim that is full leaves the rest of its share to the others in the next round."""
    counts = [0] * len(claims)
    room = max(0, room_bytes - sum(claim.num_pinned * claim.unit_bytes for claim in claims))
    limits = [claim.num_units - claim.num_pinned for claim in claims]
    open_ones = [index for index, limit in enumerate(limits) if limit]
    while open_ones:
        before = list(counts)
        demand = {index: _demand(claims[index]) for index in open_ones}
        total, left = sum(demand.values()), room
        for index in open_ones:
            share = left * demand[index] // total
            counts[index] += min(limits[index] - counts[index], share // claims[index].unit_bytes)
        room -= sum((now - then) * claim.unit_bytes for now, then, claim in zip(counts, before, claims, strict=True))
        open_ones = [index for index in open_ones if counts[index] < limits[index]]
        if counts == before:
            break
    return counts


def _demand(claim: Claim) -> int:
    """Returns the weight of a claim: density in parts per million, at least 1, times bytes. It is an integer, so that
    every host divides a budget in the same way."""
    return max(1, round(claim.density * 1_000_000)) * claim.num_units * claim.unit_bytes
