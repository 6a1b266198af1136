"""What each mechanism brings on one artifact: decoding measured with one setting more at each step.

The steps are those of LLM in a flash, Table 2, Ripple, Fig. 11, and ActiveFlow, Fig. 16, as far as one artifact can
take them: bundles and their order on flash are the artifact's own. Each step adds one setting to the best of those
before it; what loses is shown with its loss and not taken along, but for what later steps stand on. All have the same
DRAM budget. io_uring is a step where the kernel has it, and reading ahead one where a later layer's units can be
guessed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from coldpress.runtime import _native
from coldpress.runtime.cli import bench
from coldpress.runtime.generate.choice import DEFAULT_FLASH, choose_plan
from coldpress.runtime.plan import budget
from coldpress.runtime.quantities import show_bytes, table
from coldpress.runtime.store.ahead_room import NOTHING, Ahead, fitting
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest

SERIAL = "serial"
GROUND = ("hybrid", "+selector", "+bundling", "+ordering")
"""Beginnings of the names of steps that others stand on: a choice of units may cost more in scattered reads than it
saves, and pay when those are put together."""


@dataclass(frozen=True)
class Setting:
    """How an artifact is run."""

    plan: Plan
    flash: str


class Rated(Protocol):
    """What was measured of a setting."""

    @property
    def tokens_per_s(self) -> float:
        """By which settings are compared."""
        ...


RowT = TypeVar("RowT", bound=Rated)


@dataclass(frozen=True)
class Step(Generic[RowT]):
    """A setting that was measured."""

    name: str
    gain: float
    """Tokens per second over those of what was taken along before; 1 for the first."""
    total_gain: float
    """Over those of the first, of what is taken along."""
    kept: bool
    """Whether the next steps have it, too."""
    row: RowT


Change = Callable[[Setting], Setting]
"""What a step does to the best setting before it."""


def steps(manifest: Manifest, plan: Plan) -> tuple[Setting, list[tuple[str, Change]]]:
    """The first setting, which keeps nothing and chooses nothing, and the steps behind it, each with its name.

    Args:
        manifest: The artifact's.
        plan: Where the ladder leads to: its selector, cache, gap and budget.
    """
    room = plan.dram_budget_bytes
    plan = budget.refit(manifest, plan.model_copy(update=NOTHING.fields), room)
    plain = {"collapse_gap_bytes": 0, "collapse": "static"}
    dense = choose_plan(manifest, room, "dense", "static", preload="off").model_copy(update=plain)
    nothing = tuple(part.model_copy(update={"num_pinned": 0, "cache_slots": 0}) for part in dense.parts)
    base, options = ("lru", {}) if plan.cache in ("static", "linked") else (plan.cache, dict(plan.cache_options))

    def selecting(cache: str, cache_options: Mapping[str, Any]) -> Change:
        changed = plan.model_copy(update={"cache": cache, "cache_options": dict(cache_options)})
        fitted = budget.refit(manifest, changed, room)
        return lambda before: replace(before, plan=_as_before(fitted, before.plan))

    own = [] if base == "window" else [(f"+cache {base}", selecting(base, options))]
    ahead = fitting(manifest, plan)
    return Setting(dense.model_copy(update={"parts": nothing}), SERIAL), [
        ("hybrid", lambda before: replace(before, plan=dense)),
        (f"+selector {plan.method}", selecting("static", {})),
        ("+window", selecting("window", options if base == "window" else {})),
        (f"+collapse {plan.collapse_gap_bytes}", _changing(collapse_gap_bytes=plan.collapse_gap_bytes)),
        ("+collapse adaptive", _changing(collapse="adaptive")),
        *own,
        (f"+linked over {base}", selecting("linked", {"linked_over": base})),
        ("+overlap", lambda before: replace(before, flash=DEFAULT_FLASH)),
        *([] if _native.ring_error() else [("+io_uring", lambda before: replace(before, flash="io_uring"))]),
        *([("+preload", lambda before: with_preload(manifest, before, ahead))] if ahead.buffer_bytes else []),
    ]


def with_preload(manifest: Manifest, before: Setting, ahead: Ahead) -> Setting:
    """A setting that also reads ahead, in the same DRAM (ActiveFlow 3)."""
    plan = before.plan.model_copy(update=ahead.fields)
    return replace(before, plan=budget.refit(manifest, plan, plan.dram_budget_bytes))


def _changing(**fields: Any) -> Change:
    """Fields of the plan."""
    return lambda before: replace(before, plan=before.plan.model_copy(update=fields))


def _as_before(plan: Plan, before: Plan) -> Plan:
    """The plan with the reads of another."""
    return plan.model_copy(update={"collapse_gap_bytes": before.collapse_gap_bytes, "collapse": before.collapse})


def run(first: Setting, changes: Sequence[tuple[str, Change]], measure: Callable[[Setting], RowT]) -> list[Step[RowT]]:
    """Climbs from the first setting; see `steps`. `measure` is asked once for each."""
    best, row = first, measure(first)
    found: list[Step[RowT]] = [Step("naive", 1.0, 1.0, True, row)]
    rate = lowest = row.tokens_per_s
    for name, change in changes:
        setting = change(best)
        row = measure(setting)
        gain = row.tokens_per_s / rate
        kept = gain >= 1 or name.startswith(GROUND)
        if kept:
            best, rate = setting, row.tokens_per_s
        found.append(Step(name, gain, rate / lowest, kept, row))
    return found


def as_data(found: Sequence[Step[bench.Row]]) -> dict[str, Any]:
    """JSON-ready figures."""
    return {"ladder": [asdict(step) for step in found]}


def render(found: Sequence[Step[bench.Row]]) -> str:
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
