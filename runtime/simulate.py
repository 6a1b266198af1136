"""Simulates a run without model and device: replays a recorded trace through the real store, on simulated flash.

Cache, planner and store are those of a real run, so hits, misses, evictions, reads and bytes are what a real run of the
same trace has, under any budget, cache policy or collapse gap; only seconds are modelled (runtime/flash/simulated.py,
runtime/store/clock.py). A selector that sees residency would choose other units under another cache: `simulate_choices`
lets it decide anew. `simulate_opening` gives the reads before the first token.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.flash import simulated
from coldpress.runtime.sparsity import Residency
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.facts import Key, Observer, Purpose
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import END, FETCH, PRELOAD, RESET, STREAM, Event
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import RunMetrics

Choose = Callable[[Key, int, Residency], np.ndarray]
"""Layer and family, token, and where the family's units are -> the ids that the token uses, int32 ascending."""


def simulate(artifact: Artifact, plan: Plan, trace: Sequence[Event], before: Sequence[Event] = ()) -> RunMetrics:
    """Returns the metrics of a run of `trace` under `plan`.

    `decode_s` and `prefill_s` are modelled; `prefill_s` counts only flash. The events `before` fill the caches and are
    not counted; the token numbers of `trace` continue theirs.

    Raises:
        ColdpressError: if the trace asks for units that the artifact does not have.
    """
    whole = [*before, *trace]
    check_trace(artifact, whole)
    flash, clock = simulated.Plugin(artifact, plan.queue_depth), Clock(artifact.manifest, plan)
    store = Store(artifact, plan, flash, clock, requests=requests_of(whole))
    if before:
        replay(store, before)
        store.start_counting()
    replay(store, trace)
    counted = store.counters
    num_tokens = max((event.token for event in whole), default=0) - max((event.token for event in before), default=0)
    num_passes = len({event.token for event in trace if event.kind == FETCH})
    flash_s = counted.prefill_flash_s
    found = store.metrics(num_tokens, 0.0, flash_s, flash_s, num_passes)
    return found.model_copy(update={"decode_s": found.modelled_s})


def simulate_choices(
    artifact: Artifact,
    plan: Plan,
    choose: Choose,
    windows: Iterable[range],
    num_warm: int = 0,
    fill: Mapping[Key, np.ndarray] | None = None,
) -> Iterator[RunMetrics]:
    """Yields the metrics of each window of a text whose units are chosen while the run goes on.

    Args:
        artifact: An artifact, with or without files.
        plan: The parts whose requests are made, in order.
        choose: The selector.
        windows: Numbers of consecutive tokens; the caches stay between windows.
        num_warm: The first tokens of each window, which only fill the caches and are not counted.
        fill: The units that are requested before the first window, ids ascending, so that caches begin full.
    """
    flash, clock = simulated.Plugin(artifact, plan.queue_depth), Clock(artifact.manifest, plan)
    store, keys = Store(artifact, plan, flash, clock), [(part.layer, part.family) for part in plan.parts]
    for key, ids in (fill or {}).items():
        deque(store.submit(key, ids), maxlen=0)
    store.end_tokens()
    for window in windows:
        for number, token in enumerate(window):
            if number == num_warm:
                store.start_counting()
            for key in keys:
                deque(store.submit(key, choose(key, token, store.residency(key))), maxlen=0)
            store.end_tokens()
        found = store.metrics(len(window) - num_warm, 0.0, 0.0, 0.0)
        yield found.model_copy(update={"decode_s": found.modelled_s})


@dataclass
class Opening(Observer):
    """Modelled seconds of the reads before a first token."""

    load_s: float = 0.0
    """Of the pinned units."""
    pass_s: dict[Key, float] = field(default_factory=dict[Key, float])
    """Of one dense pass over each part; 0 where all units are in DRAM."""
    _under_way: Key | None = None

    def stream(self, key: Key) -> None:
        """See `Observer`."""
        self._under_way = key
        self.pass_s[key] = 0.0

    def ended(self, purpose: Purpose, num_reads: int, num_bytes: int, waited_s: float) -> None:
        """See `Observer`."""
        if purpose is Purpose.LOAD:
            self.load_s += waited_s
        elif purpose is Purpose.STREAM and self._under_way is not None:
            self.pass_s[self._under_way] += waited_s


def simulate_opening(artifact: Artifact, plan: Plan) -> Opening:
    """Returns the seconds of the reads that a store makes when it opens, and in one dense pass over every part of the
    plan, in the order of the parts."""
    found = Opening()
    store = Store(artifact, plan, simulated.Plugin(artifact, plan.queue_depth), found)
    for part in plan.parts:
        deque(store.stream((part.layer, part.family)), maxlen=0)
    return found


def requests_of(trace: Iterable[Event]) -> dict[tuple[int, str], list[np.ndarray]]:
    """Returns the ids of every fetch in order, by layer and family."""
    found: defaultdict[tuple[int, str], list[np.ndarray]] = defaultdict(list)
    for event in trace:
        if event.kind == FETCH:
            found[event.layer, event.family].append(event.ids)
    return found


def replay(store: Store, trace: Iterable[Event]) -> None:
    """Makes the requests of the trace to `store`, in the same order."""
    num_tokens = 0
    for event in trace:
        if event.kind == RESET:
            store.reset()
        elif event.kind == END:
            store.end_tokens(event.token - num_tokens)
            num_tokens = event.token
        elif event.kind == STREAM:
            deque(store.stream((event.layer, event.family)), maxlen=0)
        elif event.kind == PRELOAD:
            store.read_ahead((event.layer, event.family), event.ids)
        else:
            num_tokens = event.token - 1
            deque(store.submit((event.layer, event.family), event.ids, event.kept), maxlen=0)


def check_trace(artifact: Artifact, trace: Iterable[Event]) -> None:
    """Refuses a trace that asks for units that the artifact does not have.

    Raises:
        ColdpressError: naming the first such event.
    """
    sections = artifact.manifest.flash.sections
    known = {(layer, section.family): section.num_units for section in sections for layer in section.layers}
    for index, event in enumerate(trace):
        num_units = known.get((event.layer, event.family), 0)
        largest = int(event.ids[-1]) if event.ids.size else 0
        if event.kind in (STREAM, FETCH, PRELOAD) and largest >= num_units:
            raise ColdpressError(
                f"event {index} of the trace asks for unit {largest} of layer {event.layer}, family {event.family}, "
                f"where the artifact has {num_units} units; use a trace recorded with this artifact's model and method"
            )
