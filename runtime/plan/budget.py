"""One DRAM budget, divided: resident tensors, predictors, KV cache, buffers and bookkeeping first, then pinned units,
and cache slots with all that is left. Pure arithmetic on the manifest's plans.

Slots are spread evenly over the layers (DIP, appendix A: no gain was found from spreading them otherwise) and, where
layers or families differ, by demand: density times bytes, the flash traffic of a token without a cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

from coldpress.runtime import plugins
from coldpress.runtime.plan.bookkeeping import bookkeeping_bytes
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.layout import Plan, by_budget, placed_parts
from coldpress.schemas.manifest import MANIFEST_FILE, Manifest


class Claim(NamedTuple):
    """What one family of one layer asks of the DRAM for units."""

    density: float
    """Share of its units that a token uses."""
    num_units: int
    unit_bytes: int
    num_pinned: int


def fixed_bytes(manifest: Manifest, plan: Plan) -> int:
    """DRAM that a plan needs before any unit is kept: resident, predictors, KV cache, buffers, bookkeeping."""
    buffer_bytes = plan.read_buffer_bytes + plan.preload_buffer_bytes
    stored = plan.resident_bytes + plan.predictor_bytes + plan.kv_cache_bytes + buffer_bytes
    return stored + bookkeeping_bytes(manifest)


def used_bytes(manifest: Manifest, plan: Plan) -> int:
    """DRAM that a plan needs: the fixed part, and the slots of pinned and cached units."""
    unit_bytes = {entry.family: entry.unit_bytes for entry in manifest.families}
    slots = sum((part.num_pinned + part.cache_slots) * unit_bytes[part.family] for part in plan.parts)
    return fixed_bytes(manifest, plan) + slots


def choose_plan(manifest: Manifest, dram_budget_bytes: int | None = None, plans: Sequence[Plan] | None = None) -> Plan:
    """The plan to run with, of the manifest's or of `plans`, which were made of them.

    Without a budget, the plan with the largest one. With a budget, the largest plan that fits, else the smallest one;
    its pinned units and cache slots are then cut or extended to what the budget leaves.

    Raises:
        DoesNotFitError: if the budget cannot hold what must always be in DRAM; the text gives both numbers.
    """
    by_size = by_budget(manifest.plans if plans is None else plans)
    if dram_budget_bytes is None:
        return by_size[-1]
    fitting = [plan for plan in by_size if plan.dram_budget_bytes <= dram_budget_bytes]
    return refit(manifest, fitting[-1] if fitting else by_size[0], dram_budget_bytes)


def refit(manifest: Manifest, plan: Plan, dram_budget_bytes: int) -> Plan:
    """`plan` under another budget: pinned units first, then cache slots with what is left.

    A policy that admits nothing has no use for slots: with it, what the plan spends on them, and what the budget has
    more than the plan's, pins further units.

    Raises:
        DoesNotFitError: if the fixed part does not fit.
    """
    fixed = fixed_bytes(manifest, plan)
    if fixed > dram_budget_bytes:
        raise DoesNotFitError(
            f"{MANIFEST_FILE}: {plan.title} needs {fixed} bytes of DRAM before any unit is cached (resident "
            f"{plan.resident_bytes}, predictors {plan.predictor_bytes}, KV cache {plan.kv_cache_bytes}, bookkeeping "
            f"{bookkeeping_bytes(manifest)}, buffers the rest), the budget is {dram_budget_bytes}; raise it, or build "
            "for a shorter context or a smaller format"
        )
    room_bytes = dram_budget_bytes - fixed
    claims = _pinned(_claims(manifest, plan), room_bytes)
    if _admits(plan.cache):
        pins, slots = [0] * len(claims), _divided(claims, room_bytes)
    else:
        more_bytes = max(0, dram_budget_bytes - plan.dram_budget_bytes)
        room_bytes = min(room_bytes, used_bytes(manifest, plan) - fixed + more_bytes)
        pins, slots = _divided(claims, room_bytes), [0] * len(claims)
    parts = tuple(
        part.model_copy(update={"num_pinned": claim.num_pinned + num_more, "cache_slots": num_slots})
        for part, claim, num_more, num_slots in zip(plan.parts, claims, pins, slots, strict=True)
    )
    return plan.model_copy(update={"dram_budget_bytes": dram_budget_bytes, "parts": parts})


def with_kv_cache(manifest: Manifest, plan: Plan, kv_cache_bytes: int, dram_budget_bytes: int) -> Plan:
    """`plan` with another size of the KV cache: units give way for a larger one, within the budget.

    Raises:
        DoesNotFitError: if the budget cannot hold it.
    """
    left = dram_budget_bytes - fixed_bytes(manifest, plan) + plan.kv_cache_bytes
    if kv_cache_bytes > left:
        raise DoesNotFitError(
            f"the KV cache takes {kv_cache_bytes} bytes, {plan.title} leaves {left} of {dram_budget_bytes} bytes of "
            "DRAM for it; ask for fewer sequences or tokens, or give a larger DRAM budget"
        )
    return refit(manifest, plan.model_copy(update={"kv_cache_bytes": kv_cache_bytes}), dram_budget_bytes)


def cache_slots(cache: str, claims: Sequence[Claim], room_bytes: int) -> list[int]:
    """Cache slots of each claim beside its pinned units.

    Args:
        cache: A policy of runtime/cache; one that admits nothing gets no slots.
        claims: Of all layers and families.
        room_bytes: DRAM for units, pinned ones included.
    """
    return _divided(claims, room_bytes) if _admits(cache) else [0] * len(claims)


def _admits(cache: str) -> bool:
    return plugins.load("coldpress.runtime.cache", cache).Cache.admits


def _claims(manifest: Manifest, plan: Plan) -> list[Claim]:
    return [
        Claim(part.density, section.num_units, section.unit_bytes, part.num_pinned)
        for part, section in placed_parts(plan, manifest.flash.sections)
    ]


def _pinned(claims: list[Claim], room_bytes: int) -> list[Claim]:
    """The claims with as many pinned units as fit: the plan's, else the same share of each one's, rounded down."""
    wanted = sum(claim.num_pinned * claim.unit_bytes for claim in claims)
    if wanted <= room_bytes:
        return claims
    return [claim._replace(num_pinned=claim.num_pinned * room_bytes // wanted) for claim in claims]


def _divided(claims: Sequence[Claim], room_bytes: int) -> list[int]:
    """Further units of each claim: the room that pinned units leave, by demand, at most all of a claim's units."""
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
    """Weight of a claim, exact: parts per million of density times bytes; every one counts for something."""
    return max(1, round(claim.density * 1_000_000)) * claim.num_units * claim.unit_bytes
