"""What each mechanism brings on one artifact: decoding measured with one setting more at each step.

The steps are those of LLM in a flash, Table 2, Ripple, Fig. 11, and ActiveFlow, Fig. 16, as far as one artifact can
take them: bundles and their order on flash are the artifact's own. Each step adds one setting to the best of those
before it; what loses is shown with its loss and not taken along. All have the same DRAM budget.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runtime import _bench, budget
from runtime.opening import DEFAULT_FLASH, choose_plan
from runtime.quantities import show_bytes, table
from schemas.layout import Plan
from schemas.manifest import Manifest

SERIAL = "serial"


@dataclass(frozen=True)
class Setting:
    """How an artifact is run."""

    plan: Plan
    flash: str


@dataclass(frozen=True)
class Step:
    """A setting that was measured."""

    name: str
    gain: float
    """Tokens per second over those of the best setting before; 1 for the first."""
    total_gain: float
    """Over those of the first, of the best setting so far."""
    kept: bool
    """Whether the next steps have it, too."""
    row: _bench.Row


Change = Callable[[Setting], Setting]
"""What a step does to the best setting before it."""


def steps(manifest: Manifest, plan: Plan) -> tuple[Setting, list[tuple[str, Change]]]:
    """The first setting, which keeps nothing and chooses nothing, and the steps behind it, each with its name.

    Args:
        manifest: The artifact's.
        plan: Where the ladder leads to: its selector, cache, gap and budget.
    """
    room = plan.dram_budget_bytes
    dense = choose_plan(manifest, room, "dense", "static").model_copy(update={"collapse_gap_bytes": 0})
    nothing = tuple(part.model_copy(update={"num_pinned": 0, "cache_slots": 0}) for part in dense.parts)
    base, options = ("lru", {}) if plan.cache in ("static", "linked") else (plan.cache, dict(plan.cache_options))

    def selecting(cache: str, cache_options: Mapping[str, Any]) -> Change:
        changed = plan.model_copy(update={"cache": cache, "cache_options": dict(cache_options)})
        fitted = budget.refit(manifest, changed, room)
        return lambda before: Setting(_with_gap(fitted, before.plan.collapse_gap_bytes), before.flash)

    return Setting(dense.model_copy(update={"parts": nothing}), SERIAL), [
        ("hybrid", lambda _: Setting(dense, SERIAL)),
        (f"+selector {plan.method}", selecting("static", {})),
        (f"+cache {base}", selecting(base, options)),
        (
            f"+collapse {plan.collapse_gap_bytes}",
            lambda before: Setting(_with_gap(before.plan, plan.collapse_gap_bytes), before.flash),
        ),
        (f"+linked over {base}", selecting("linked", {"linked_over": base})),
        ("+overlap", lambda before: Setting(before.plan, DEFAULT_FLASH)),
    ]


def _with_gap(plan: Plan, gap_bytes: int) -> Plan:
    return plan.model_copy(update={"collapse_gap_bytes": gap_bytes})


def run(first: Setting, changes: Sequence[tuple[str, Change]], measure: Callable[[Setting], _bench.Row]) -> list[Step]:
    """Climbs from the first setting; see `steps`. `measure` is asked once for each."""
    best, row = first, measure(first)
    found = [Step("naive", 1.0, 1.0, True, row)]
    rate = lowest = row.tokens_per_s
    for name, change in changes:
        setting = change(best)
        row = measure(setting)
        gain = row.tokens_per_s / rate
        if gain >= 1:
            best, rate = setting, row.tokens_per_s
        found.append(Step(name, gain, rate / lowest, gain >= 1, row))
    return found


def as_data(found: Sequence[Step]) -> dict[str, Any]:
    """JSON-ready figures."""
    return {"ladder": [asdict(step) for step in found]}


def render(found: Sequence[Step]) -> str:
    """The waterfall for people."""
    head = ("step", "tokens/s", "gain", "in all", "kept", "reads/token", "bytes/token", "hit rate", "flash ms/token")
    lines = [
        (
            step.name,
            f"{step.row.tokens_per_s:.2f}",
            f"{step.gain:.2f}",
            f"{step.total_gain:.2f}",
            "yes" if step.kept else "no",
            f"{step.row.reads_per_token:.1f}",
            show_bytes(step.row.read_bytes_per_token),
            f"{step.row.hit_rate:.3f}",
            f"{1000 * step.row.flash_s_per_token:.2f}",
        )
        for step in found
    ]
    return table([head, *lines])
