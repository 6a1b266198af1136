"""Says where a DRAM budget serves a mixture's experts badly: too small for one token, or just before it would pay more.

The figures are those that calibration measured (schemas/experts.py); an artifact carries them in experts.json.
"""

from collections.abc import Iterable

import numpy as np

from coldpress.schemas.experts import ExpertCurve
from coldpress.schemas.families import num_experts, used_share
from coldpress.schemas.layout import PartPlan, Plan, Section, placed_parts
from coldpress.schemas.model import ModelSpec

STEP_SHARE = 0.1
"""The part of the budget whose worth is compared."""
CLIFF = 2.0
"""Times as many saved reads that make the next part of the budget worth a sentence."""
LEAST_SAVED = 0.01
"""Saved reads below this are noise."""
ADMITS_NOTHING = "static"
"""The cache policy under which DRAM holds a fixed set."""


def warning(curve: ExpertCurve, plan: Plan, spec: ModelSpec, sections: Iterable[Section]) -> str | None:
    """Returns one sentence if a budget serves experts badly; None if it does not, or if tokens use parts of experts.

    Either some layer holds fewer experts than a token uses; or the next tenth of the budget would save more than twice
    the reads that the last one saved, by the measured curve of the plan's kind of cache.
    """
    placed = _whole_experts(plan, spec, sections)
    if not placed:
        return None
    held = np.array([_held(part, section, spec) for part, section in placed])
    expert_bytes = np.array([section.num_units // spec.num_experts * section.unit_bytes for _, section in placed])
    lacking = np.maximum(0, curve.num_experts_per_tok - held)
    if lacking.any():
        at = int(lacking.argmax())
        return (
            f"layer {placed[at][0].layer} has room for {held[at]:.1f} of {spec.num_experts} experts, fewer than the "
            f"{curve.num_experts_per_tok} of one token, so that every token reads experts; "
            f"{int((lacking * expert_bytes).sum())} bytes more DRAM would hold a token's experts"
        )
    step_bytes = STEP_SHARE * plan.dram_budget_bytes
    more = step_bytes / float(expert_bytes.sum())
    misses = curve.static_misses if plan.cache == ADMITS_NOTHING else curve.lru_misses
    less, now, after = (_missed(misses, float(held.mean()) + change) for change in (-more, 0.0, more))
    if now - after < LEAST_SAVED or now - after <= CLIFF * (less - now):
        return None
    return (
        f"with {STEP_SHARE:.0%} more DRAM, {step_bytes:.0f} bytes, the experts' hit rate would rise by "
        f"{100 * (now - after):.0f} points; the last {STEP_SHARE:.0%} raised it by {100 * (less - now):.0f}: a larger "
        "dram_budget pays"
    )


def mean_held(plan: Plan, spec: ModelSpec, sections: Iterable[Section]) -> float | None:
    """Returns how many experts a layer has room for, the mean over layers; None if tokens use parts of experts."""
    placed = _whole_experts(plan, spec, sections)
    return float(np.mean([_held(part, section, spec) for part, section in placed])) if placed else None


def _whole_experts(plan: Plan, spec: ModelSpec, sections: Iterable[Section]) -> list[tuple[PartPlan, Section]]:
    return [
        (part, section)
        for part, section in placed_parts(plan, sections)
        if num_experts(part.family, spec) > 1 and part.density == used_share(part.family, spec)
    ]


def _held(part: PartPlan, section: Section, spec: ModelSpec) -> float:
    return (part.num_pinned + part.cache_slots) * spec.num_experts / section.num_units


def _missed(misses: tuple[float, ...], held: float) -> float:
    """Returns the missed share of the uses for any number of held experts: all if there are none."""
    return float(np.interp(held, np.arange(len(misses) + 1), [1.0, *misses]))
