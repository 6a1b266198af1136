"""Measures the gain of each mechanism on one artifact: each step decodes with one more setting.

The steps follow LLM in a flash, Table 2, Ripple, Fig. 11, and ActiveFlow, Fig. 16, as far as one artifact can take
them: all steps have the artifact's units, their order on flash, and the same DRAM budget. io_uring is a step where the
kernel has it, and preloading is one where the units of a later layer can be guessed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.cli import bench
from coldpress.runtime.dram import budget
from coldpress.runtime.generate.choice import DEFAULT_FLASH, choose_plan
from coldpress.runtime.quantities import show_bytes, table
from coldpress.runtime.store.preload_room import NOTHING, Preloading, fitting
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest

SERIAL = "serial"
GROUND = ("hybrid", "+selector", "+bundling", "+ordering")
"""Steps that later steps need, by the beginning of their names: they stay even without a gain. A choice of units, for
example, may cost more in scattered reads than it saves, until a later step joins those reads."""
ROUNDS = 3
"""Rounds in which a measured step and the best one before it take turns."""
NOISE = 2.0
"""A step gains if its gain exceeds 1 by this many standard errors over the rounds."""
MEANINGS = {
    "naive": "every unit is read for every token, computing waits for it, and no unit stays in DRAM "
    "(LLM in a flash, Table 2)",
    "hybrid": "the same with as many units pinned as the DRAM holds (LLM in a flash, Table 2). "
    "`bench --ladder` streams this artifact's layout; the report streams the layout of a build with method=dense, "
    "and overlaps computing with reading",
    "+selector": "only the units that the selector chooses are read",
    "+bundling": "the slices of a unit lie together on flash",
    "+window": "the units of the last tokens stay in DRAM (LLM in a flash)",
    "+ordering": "units that are used together lie together on flash (Ripple)",
    "+collapse": "reads are joined across gaps of at most this many bytes; adaptive: the gap adapts (Ripple)",
    "+cache": "this cache policy replaces the window",
    "+linked": "runs of neighbours on flash enter that cache less often (Ripple)",
    "+overlap": "computing goes on while units are read",
    "+io_uring": "reads go through io_uring",
    "+preload": "units that the next layers will probably use are preloaded (ActiveFlow)",
}
"""The beginning of a step's name -> what the step does."""


@dataclass(frozen=True)
class LadderSetting:
    plan: Plan
    flash: str


class Rated(Protocol):
    @property
    def tokens_per_s(self) -> float: ...


RowT = TypeVar("RowT", bound=Rated)


@dataclass(frozen=True)
class LadderStep(Generic[RowT]):
    name: str
    gain: float
    """Tokens per second over those of the best setting before it, a mean over rounds; 1 for the first step."""
    gain_error: float
    """Standard error of the gain over rounds; 0 for one round, as in a simulation, which has no noise."""
    total_gain: float
    """Tokens per second of the best setting so far over those of the first step."""
    kept: bool
    """True if the next steps build on it."""
    row: RowT
    """The setting's figures in the round of median speed."""


Change = Callable[[LadderSetting], LadderSetting]
"""Makes a step's setting from the best setting before it."""


def steps(manifest: Manifest, plan: Plan) -> tuple[LadderSetting, list[tuple[str, Change]]]:
    """Returns the first setting, which caches nothing and uses every unit, and the named steps after it. `plan` is that
    of the last step: its selector, cache, gap and budget."""
    room = plan.dram_budget_bytes
    plan = budget.refit(manifest, plan.model_copy(update=NOTHING.fields), room)
    plain = {"collapse_gap_bytes": 0, "collapse": "static"}
    dense = choose_plan(manifest, room, "dense", "static", preload="off").model_copy(update=plain)
    nothing = tuple(part.model_copy(update={"num_pinned": 0, "cache_slots": 0}) for part in dense.parts)
    base, options = ("lru", {}) if plan.cache in ("static", "linked") else (plan.cache, dict(plan.cache_options))

    def selecting(cache: str, cache_options: Mapping[str, Any]) -> Change:
        changed = plan.model_copy(update={"cache": cache, "cache_options": dict(cache_options)})
        fitted = budget.refit(manifest, changed, room)
        return lambda before: replace(before, plan=fitted.model_copy(update=_gap_of(before.plan)))

    policy = [] if base == "window" else [(f"+cache {base}", selecting(base, options))]
    preloading = fitting(manifest, plan)
    return LadderSetting(dense.model_copy(update={"parts": nothing}), SERIAL), [
        ("hybrid", lambda before: replace(before, plan=dense)),
        (f"+selector {plan.method}", selecting("static", {})),
        ("+window", selecting("window", options if base == "window" else {})),
        (f"+collapse {plan.collapse_gap_bytes}", _changing(collapse_gap_bytes=plan.collapse_gap_bytes)),
        ("+collapse adaptive", _changing(collapse="adaptive")),
        *policy,
        (f"+linked over {base}", selecting("linked", {"linked_over": base})),
        ("+overlap", lambda before: replace(before, flash=DEFAULT_FLASH)),
        *([] if _native.ring_error() else [("+io_uring", lambda before: replace(before, flash="io_uring"))]),
        *([("+preload", lambda before: with_preload(manifest, before, preloading))] if preloading.buffer_bytes else []),
    ]


def with_preload(manifest: Manifest, before: LadderSetting, preloading: Preloading) -> LadderSetting:
    """Returns a setting that also preloads, in the same DRAM (ActiveFlow 3)."""
    plan = before.plan.model_copy(update=preloading.fields)
    return replace(before, plan=budget.refit(manifest, plan, plan.dram_budget_bytes))


def _changing(**fields: Any) -> Change:
    return lambda before: replace(before, plan=before.plan.model_copy(update=fields))


def _gap_of(plan: Plan) -> dict[str, Any]:
    return {"collapse_gap_bytes": plan.collapse_gap_bytes, "collapse": plan.collapse}


def run(
    first: LadderSetting,
    changes: Sequence[tuple[str, Change]],
    measure: Callable[[LadderSetting], RowT],
    rounds: int = 1,
) -> list[LadderStep[RowT]]:
    """Measures the first setting, then each step in turns with the best setting before it; see `steps`. They take turns
    `rounds` times; 1 where measuring has no noise: then each setting is measured once. A step whose gain does not
    exceed its noise is left out, unless later steps need it."""
    best, row = first, measure(first)
    found: list[LadderStep[RowT]] = [LadderStep("naive", 1.0, 0.0, 1.0, True, row)]
    rate = lowest = row.tokens_per_s
    for name, change in changes:
        setting = change(best)
        turns = [(measure(best).tokens_per_s if rounds > 1 else rate, measure(setting)) for _ in range(rounds)]
        gains = np.array([then.tokens_per_s / before for before, then in turns])
        gain, error = float(gains.mean()), float(gains.std(ddof=1)) / math.sqrt(rounds) if rounds > 1 else 0.0
        row = turns[int(np.argsort([then.tokens_per_s for _, then in turns])[rounds // 2])][1]
        kept = gain - NOISE * error >= 1 or name.startswith(GROUND)
        if kept:
            best, rate = setting, row.tokens_per_s
        found.append(LadderStep(name, gain, error, rate / lowest, kept, row))
    return found


def legend(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (beginning of the name, meaning) for each kind of step among these names."""
    return [
        (beginning, meaning)
        for beginning, meaning in MEANINGS.items()
        if any(name.startswith(beginning) for name in names)
    ]


def render(found: Sequence[LadderStep[bench.Row]]) -> str:
    head = ("step", "tokens/s", "gain", "in all", "kept", "reads/token", "bytes/token", "hit rate", "flash ms/token")
    lines = [
        (
            step.name,
            f"{step.row.tokens_per_s:.2f}",
            f"{step.gain:.2f} ± {step.gain_error:.2f}",
            f"{step.total_gain:.2f}",
            "yes" if step.kept else "no",
            f"{step.row.reads_per_token:.1f}",
            show_bytes(step.row.read_bytes_per_token),
            f"{step.row.hit_rate:.3f}",
            f"{1000 * step.row.flash_s_per_token:.2f}",
        )
        for step in found
    ]
    meanings = [f"{name}: {meaning}" for name, meaning in legend([step.name for step in found])]
    note = (
        f"gain: over the best step before it, a mean of {ROUNDS} rounds in turns; ± is its standard error. A step is "
        f"kept where it gains more than {NOISE:g} of them, or where later steps need it."
    )
    return "\n".join([table([head, *lines]), "", note, *meanings])
