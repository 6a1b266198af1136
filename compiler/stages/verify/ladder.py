"""Simulates what each mechanism brings on the artifact's device: runtime/cli/ladder.py in modelled seconds.

The requests are those that `verify` recorded. Each step is the real store on simulated flash (runtime/simulate.py), so
the figures do not depend on the machine. The first half of the recorded tokens fills the caches and is not counted.
Ordering is a step of its own here: the steps before it have the same units in the model's own order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.cli import ladder
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import END, FETCH, PRELOAD, Event
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import LadderStep

DENSE = "dense"
UNMODELLED = "+io_uring"
"""A step whose gain only a real machine shows."""
FIRST_OF_FLASH = "+collapse"
"""Beginning of the name of the step that ordering comes before: first units that are used together are put together,
then the gaps between them are read (Ripple 4 and 5)."""


@dataclass(frozen=True)
class Placed(ladder.Setting):
    """A setting, and whether units lie on flash as the artifact has them."""

    ordered: bool


@dataclass(frozen=True)
class Simulated:
    """Figures of a decoded token."""

    tokens_per_s: float
    reads: float
    read_bytes: float
    hit_rate: float


def climb(artifact: Artifact, plan: Plan, trace: Sequence[Event]) -> tuple[LadderStep, ...]:
    """Returns the steps up to `plan`, each beside the best before it; none if nothing is pruned.

    Args:
        artifact: The artifact that the trace was recorded from.
        plan: The last step's. Its selector must not see what is in DRAM: under another plan it would make other
            requests than the recorded ones.
        trace: The requests of decoding two tokens or more under `plan`.
    """
    if plan.method == DENSE or all(part.density >= 1 for part in plan.parts):
        return ()
    first, changes = ladder.steps(artifact.manifest, plan)
    # what is guessed is in the trace only where the plan reads ahead
    unknown = (UNMODELLED,) if plan.preload_buffer_bytes else (UNMODELLED, "+preload")
    changes = [(name, change) for name, change in changes if name not in unknown]
    where = next(index for index, (name, _) in enumerate(changes) if name.startswith(FIRST_OF_FLASH))
    changes.insert(where, ("+ordering", _order))
    layouts = {True: artifact, False: structural(artifact)}

    def measure(setting: ladder.Setting) -> Simulated:
        assert isinstance(setting, Placed)
        return simulated(layouts[setting.ordered], setting, trace)

    found = ladder.run(Placed(first.plan, first.flash, ordered=False), changes, measure)
    return tuple(
        LadderStep(
            name=step.name,
            tokens_per_s=step.row.tokens_per_s,
            gain=step.gain,
            kept=step.kept,
            reads_per_token=step.row.reads,
            read_bytes_per_token=step.row.read_bytes,
            hit_rate=step.row.hit_rate,
        )
        for step in found
    )


def structural(artifact: Artifact) -> Artifact:
    """The artifact with the units of every section in the model's own order on flash; only for simulated flash."""
    orders = {name: np.sort(table) for name, table in artifact.tables.items() if name.startswith("order.")}
    return replace(artifact, tables={**artifact.tables, **orders})


def simulated(artifact: Artifact, setting: ladder.Setting, trace: Sequence[Event]) -> Simulated:
    """A token of the trace's second half under this setting."""
    plan = setting.plan
    if plan.method == DENSE:
        found = simulate(artifact, plan, every_unit(artifact))
    else:
        asked = [event for event in trace if plan.preload_buffer_bytes or event.kind != PRELOAD]
        half = max(event.token for event in asked) // 2
        first, then = ([event for event in asked if (event.token > half) == later] for later in (False, True))
        found = simulate(artifact, plan, then, before=first)
    # without overlap a request is read, and then computed with
    serial = setting.flash == ladder.SERIAL
    seconds = found.modelled_flash_s + found.modelled_dram_s if serial else found.modelled_s
    count = found.num_tokens
    return Simulated(count / seconds, found.reads / count, found.read_bytes / count, found.hit_rate)


def every_unit(artifact: Artifact) -> list[Event]:
    """The requests of one token that uses all units."""
    sections = artifact.manifest.flash.sections
    fetched = [
        Event(FETCH, 1, layer, section.family, np.arange(section.num_units, dtype=np.int32))
        for section in sections
        for layer in section.layers
    ]
    return [*fetched, Event(END, 1, 0, sections[0].family, np.empty(0, np.int32))]


def _order(before: ladder.Setting) -> ladder.Setting:
    assert isinstance(before, Placed)
    return replace(before, ordered=True)
