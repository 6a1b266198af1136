"""Simulates what each mechanism brings on the artifact's device: runtime/cli/ladder.py in modelled seconds.

The first steps are dense runs of the model (compiler/dense_run.py), as in LLM in a flash, Table 2: all units streamed
from a layout of their own, attention resident. `naive` pins nothing, and reads before it computes; `hybrid` is the
dense run that the whole report compares with. The other steps are the artifact on the real store with simulated flash
(runtime/simulate.py), for the requests that `verify` recorded, so that the figures depend on no machine. The first half
of the recorded tokens fills the caches and is not counted. Ordering is a separate step here: in the steps before it,
units lie in the model's own order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coldpress.compiler.cost_model import flash_bytes
from coldpress.compiler.dense_run import dense_for, formats_of
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.cli import ladder
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import PRELOAD, Event
from coldpress.schemas.compute import Overlap
from coldpress.schemas.families import dense_family
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import DenseRun, LadderStep
from coldpress.schemas.model import Model

DENSE = "dense"
UNMODELLED = "+io_uring"
"""A step whose gain only a real machine shows."""
OVERLAP = "+overlap"
"""The second step here: all later steps overlap reading and computing, like the dense run they are compared with."""
FIRST_OF_FLASH = "+collapse"
"""Beginning of the name of the step after ordering: first units that are used together are placed together, then the
gaps between them are read (Ripple 4 and 5)."""


@dataclass(frozen=True)
class Placed(ladder.LadderSetting):
    ordered: bool
    """True if units lie in the artifact's order, False if in the model's own."""
    dense: DenseRun | None = None
    """A dense run of the model instead of the artifact."""


@dataclass(frozen=True)
class Simulated:
    """Mean figures of a decoded token."""

    tokens_per_s: float
    reads: float
    read_bytes: float
    hit_rate: float


def climb(artifact: Artifact, plan: Plan, trace: Sequence[Event], model: Model) -> tuple[LadderStep, ...]:
    """Returns the steps up to `plan`, each beside the best step before it; none where the plan uses every unit. The
    ladder begins with the selector if no dense run fits the budget. `trace` has the requests of two decoded tokens or
    more under `plan`, whose selector must not see what is in DRAM: under another plan it would make others."""
    if plan.method == DENSE or all(part.density >= 1 for part in plan.parts):
        return ()
    name, first, changes = _steps(artifact, plan, model)
    layouts = {True: artifact, False: structural(artifact)}
    units_bytes = flash_bytes((dense_family(model.spec),), model.spec, formats_of(artifact.manifest))
    known: list[tuple[Placed, Simulated]] = []

    def measure(setting: ladder.LadderSetting) -> Simulated:
        assert isinstance(setting, Placed)
        if (run := setting.dense) is not None:
            held = run.pinned_bytes / units_bytes
            tokens_per_s = 1 / run.seconds(_overlap(setting.flash))
            return Simulated(tokens_per_s, run.reads_per_token, run.flash_bytes_per_token, held)
        asked = in_effect(setting)
        found = next((figures for other, figures in known if other == asked), None)
        if found is None:
            found = simulated(layouts[setting.ordered], setting, trace)
            known.append((asked, found))
        return found

    found = ladder.run(first, changes, measure)
    return tuple(
        LadderStep(
            name=step.name if index else name,
            tokens_per_s=step.row.tokens_per_s,
            gain=step.gain,
            kept=step.kept,
            reads_per_token=step.row.reads,
            read_bytes_per_token=step.row.read_bytes,
            hit_rate=step.row.hit_rate,
        )
        for index, step in enumerate(found)
    )


def _steps(
    artifact: Artifact, plan: Plan, model: Model
) -> tuple[str, ladder.LadderSetting, list[tuple[str, ladder.Change]]]:
    start, changes = ladder.steps(artifact.manifest, plan)
    # the trace holds guessed units only where the plan preloads
    unknown = (UNMODELLED,) if plan.preload_buffer_bytes else (UNMODELLED, "+preload")
    overlap = next(change for change in changes if change[0] == OVERLAP)
    (_, select), *others = [change for change in changes if change[0] not in (*unknown, OVERLAP, "hybrid")]
    where = next(index for index, (name, _) in enumerate(others) if name.startswith(FIRST_OF_FLASH))
    others.insert(where, ("+ordering", lambda before: replace(before, ordered=True)))
    naive, hybrid = (dense_for(model, artifact.manifest, plan, naive=word) for word in (True, False))
    first = Placed(start.plan, start.flash, ordered=False, dense=naive)
    if naive is None:
        return f"selector {plan.method}", replace(select(first), dense=None), [overlap, *others]
    after_naive: list[tuple[str, ladder.Change]] = [
        overlap,
        ("hybrid", lambda before: replace(before, dense=hybrid)),
        (f"+selector {plan.method}", lambda before: replace(select(before), dense=None)),
        *others,
    ]
    return "naive", first, after_naive


def in_effect(setting: Placed) -> Placed:
    """Returns a setting without the cache policy if there is no slot for it: equal ones have equal figures."""
    if any(part.cache_slots for part in setting.plan.parts):
        return setting
    return replace(setting, plan=setting.plan.model_copy(update={"cache": "static", "cache_options": {}}))


def _overlap(flash: str) -> Overlap:
    """Returns the parts of a run that overlap; with serial flash, computing starts when the whole request is read."""
    return "none" if flash == ladder.SERIAL else "request"


def structural(artifact: Artifact) -> Artifact:
    """Puts all units of the artifact in the model's own order on flash; for simulated flash only."""
    orders = {name: np.sort(table) for name, table in artifact.tables.items() if name.startswith("order.")}
    return replace(artifact, tables={**artifact.tables, **orders})


def simulated(artifact: Artifact, setting: ladder.LadderSetting, trace: Sequence[Event]) -> Simulated:
    """Simulates the trace's second half under this setting; returns the figures of a token."""
    plan = setting.plan
    asked = [event for event in trace if plan.preload_buffer_bytes or event.kind != PRELOAD]
    half = max(event.token for event in asked) // 2
    first, then = ([event for event in asked if (event.token > half) == later] for later in (False, True))
    found = simulate(artifact, plan, then, before=first)
    seconds, count = found.modelled_seconds(_overlap(setting.flash)), found.num_tokens
    return Simulated(count / seconds, found.reads / count, found.read_bytes / count, found.hit_rate)
