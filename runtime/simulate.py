"""Simulates a run without model and device: replays a trace, recorded or drawn, through the store on simulated flash.

Cache, planner and store are those of a real run, so hits, misses, evictions, reads and bytes are what a real run of the
same trace has, under any budget, cache policy or collapse gap; only seconds are modelled (runtime/flash/simulated.py,
runtime/store/clock.py). A selector that sees residency would choose other units under another cache: `simulate_choices`
lets it decide anew, `by_signals` from recorded signals. `simulate_opening` gives the reads before the first token.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.flash import simulated
from coldpress.runtime.sparsity import Residency, Selector
from coldpress.runtime.store import computing, resident
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.computing import NOTHING, Arrival
from coldpress.runtime.store.facts import Key, Observer, Purpose
from coldpress.runtime.store.preload_room import following, reads_on
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import END, FETCH, PRELOAD, RESET, ROWS, STREAM, Event
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import num_experts, unit_keys
from coldpress.schemas.layout import Plan, placed_parts
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import RunMetrics

Choose = Callable[[Key, int, Residency], np.ndarray]
"""Layer and family, token, and where the family's units are -> the ids that the token uses, int32 ascending."""


def simulate(artifact: Artifact, plan: Plan, trace: Iterable[Event], before: Sequence[Event] = ()) -> RunMetrics:
    """Returns the metrics of a run of `trace` under `plan`.

    `decode_s` and `prefill_s` are modelled; `prefill_s` counts only flash. The events `before` fill the caches and are
    not counted; the token numbers of `trace` continue theirs. The trace is not held in memory, unless the cache looks
    ahead. Raises `ColdpressError` if the trace asks for units that the artifact does not have.
    """
    requests = None
    if plugins.load_class("coldpress.runtime.cache", CachePolicy, plan.cache).looks_ahead:
        trace = list(trace)
        requests = defaultdict[Key, list[np.ndarray]](list)
        for event in (*before, *trace):
            if event.kind == FETCH:
                requests[event.layer, event.family].append(event.ids)
    flash, clock = simulated.Plugin(artifact, plan.queue_depth), Clock(artifact.manifest, plan)
    store, checked = Store(artifact, plan, flash, clock, requests=requests), Checked(artifact)
    if before:
        replay(store, checked(before))
        store.start_counting()
        checked.start_counting()
    replay(store, checked(trace))
    flash_s = store.counters.prefill_flash_s
    found = store.metrics(checked.num_tokens, 0.0, flash_s, flash_s, checked.num_passes)
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
        windows: Numbers of consecutive tokens; the caches stay between windows.
        num_warm: The first tokens of each window, which only fill the caches and are not counted.
        fill: The units that are requested before the first window, ids ascending, so that caches begin full.
    """
    flash, clock = simulated.Plugin(artifact, plan.queue_depth), Clock(artifact.manifest, plan)
    store, keys = Store(artifact, plan, flash, clock), [(part.layer, part.family) for part in plan.parts]
    after, reads_rows = units_following(artifact, plan), times_traced(artifact.manifest, plan) == 1
    for key, ids in (fill or {}).items():
        deque(store.submit(key, ids), maxlen=0)
    store.end_tokens()
    for window in windows:
        for number, token in enumerate(window):
            if number == num_warm:
                store.start_counting()
            for key in keys:
                deque(store.submit(key, choose(key, token, store.residency(key))), maxlen=0)
                if key in after:
                    store.preload(*after[key])
            if reads_rows:
                read_some_rows(store, range(token, token + 1))
            store.end_tokens()
        found = store.metrics(len(window) - num_warm, 0.0, 0.0, 0.0)
        yield found.model_copy(update={"decode_s": found.modelled_s})


def by_signals(
    selector: Selector[Any],
    arrays: Mapping[Key, Mapping[str, np.ndarray]],
    signals: Mapping[Key, np.ndarray],
    experts: Mapping[Key, np.ndarray],
) -> Choose:
    """Returns a selector's choice for the tokens of a text whose signals are known.

    `signals` has the selector's signal for each token, float [num_tokens, n]; `experts` those that each token uses,
    bool [num_tokens, E], of families whose units belong to experts.
    """

    def choose(key: Key, token: int, residency: Residency) -> np.ndarray:
        signal = signals[key][token].astype(np.float32, copy=False)
        return selector.select_among(signal, arrays[key], residency, experts[key][token] if key in experts else None)

    return choose


def token_seconds_of(manifest: Manifest, plan: Plan, found: RunMetrics, more_s: float = 0.0) -> float:
    """Returns modelled seconds of a token of a simulated run; the layers of the plan's parts stand for all layers.
    `more_s` is what a token computes besides, and the manifest does not say."""
    besides_s = resident.token_seconds(manifest, plan)
    requests_s = (found.modelled_s / found.num_tokens - besides_s) * times_traced(manifest, plan)
    return requests_s + (besides_s + more_s)


def pass_seconds(artifact: Artifact, plan: Plan, most_tokens: int) -> list[float]:
    """Returns modelled seconds of passes of 1, 2, ... `most_tokens` whose tokens use every unit: each reads what one
    token reads, and computes with each of its tokens (runtime/store/computing.py). The layers of the plan's parts stand
    for all layers."""
    counts, device = range(1, most_tokens + 1), artifact.manifest.device
    manifests = [on_device(artifact, computing.in_pass(device, count)).manifest for count in counts]
    clocks = [Clock(manifest, plan) for manifest in manifests]
    store = Store(artifact, plan, simulated.Plugin(artifact, plan.queue_depth), *clocks)
    units, after = all_units(artifact, plan), units_following(artifact, plan)
    for _ in ("the first pass fills caches", "the second one counts"):
        for clock in clocks:
            clock.start()
        for key, ids in units.items():
            deque(store.submit(key, ids), maxlen=0)
            if key in after:
                store.preload(*after[key])
        store.end_tokens()
    times = times_traced(artifact.manifest, plan)
    return [
        times * clock.fetch_s + resident.token_seconds(manifest, plan)
        for clock, manifest in zip(clocks, manifests, strict=True)
    ]


def all_units(artifact: Artifact, plan: Plan) -> dict[Key, np.ndarray]:
    placed = placed_parts(plan, artifact.manifest.flash.sections)
    return {(part.layer, part.family): np.arange(section.num_units, dtype=np.int32) for part, section in placed}


def units_following(artifact: Artifact, plan: Plan) -> dict[Key, tuple[Key, np.ndarray]]:
    """Returns the units that a dense run preloads after each part of the plan: those of the next part, without a guess.
    It is empty where the plan preloads nothing, and where units would have to be guessed."""
    placed = placed_parts(plan, artifact.manifest.flash.sections)
    sections = [section for _, section in placed]
    if not plan.preload_buffer_bytes or not reads_on(plan, sections):
        return {}
    units, after = all_units(artifact, plan), following(sections, wraps=True)
    next_keys = {key: (section.first_layer, section.family) for key, (_, section) in after.items()}
    return {key: (next_key, units[next_key]) for key, next_key in next_keys.items()}


def on_device(artifact: Artifact, device: DeviceProfile | None) -> Artifact:
    """Returns the artifact as if compiled for `device`, which changes only the seconds of a simulation. The caller
    keeps `artifact` alive: the copy shares its open folder."""
    if device is None:
        return artifact
    return replace(artifact, manifest=artifact.manifest.model_copy(update={"device": device}))


def times_traced(manifest: Manifest, plan: Plan) -> float:
    """Returns how many layers with units each layer of the plan's parts stands for."""
    families = [entry.family for entry in manifest.families]
    having = {layer for layer, _ in unit_keys(families, manifest.model)}
    return len(having) / len({part.layer for part in plan.parts})


@dataclass
class Opening(Observer):
    load_s: float = 0.0
    """Seconds for the pinned units."""
    passes: dict[Key, Arrival] = field(default_factory=dict[Key, Arrival])
    """Reads of one dense pass over units of each part; NOTHING where all units are in DRAM."""
    _under_way: Key | None = None

    def stream(self, key: Key, ids: np.ndarray | None) -> None:
        self._under_way = key
        self.passes[key] = NOTHING

    def ended(self, purpose: Purpose, num_reads: int, num_bytes: int, waited_s: float) -> None:
        if purpose is Purpose.LOAD:
            self.load_s += waited_s
        elif purpose is Purpose.STREAM and self._under_way is not None:
            known = self.passes[self._under_way]
            self.passes[self._under_way] = Arrival(known.flash_s + waited_s, known.num_portions + 1, reads_on=True)


def simulate_opening(artifact: Artifact, plan: Plan, experts_read: int | None = None) -> Opening:
    """Returns the seconds of the reads that a store makes when it opens, and in one dense pass over every part of the
    plan, in the order of the parts; of a mixture over so many experts, spread evenly, or over all."""
    found = Opening()
    store = Store(artifact, plan, simulated.Plugin(artifact, plan.queue_depth), found)
    for key, ids in all_units(artifact, plan).items():
        experts = num_experts(key[1], artifact.manifest.model)
        if experts_read is None or experts_read >= experts:
            deque(store.stream(key), maxlen=0)
            continue
        read = np.arange(experts_read) * experts // experts_read
        deque(store.stream(key, ids.reshape(experts, -1)[read].ravel()), maxlen=0)
    return found


def replay(store: Store, trace: Iterable[Event]) -> None:
    num_tokens, has_rows = 0, False
    for event in trace:
        if event.kind == RESET:
            store.reset()
        elif event.kind == END:
            if not has_rows:
                read_some_rows(store, range(num_tokens, event.token))
            store.end_tokens(event.token - num_tokens)
            num_tokens, has_rows = event.token, False
        elif event.kind == ROWS:
            has_rows |= event.token > 0
            store.read_rows(event.ids, Purpose.ROWS if event.token else Purpose.STREAM)
        elif event.kind == STREAM:
            deque(store.stream((event.layer, event.family), event.ids if event.ids.size else None), maxlen=0)
        elif event.kind == PRELOAD:
            store.preload((event.layer, event.family), event.ids)
        else:
            num_tokens = event.token - 1
            deque(store.submit((event.layer, event.family), event.ids, event.kept), maxlen=0)


def read_some_rows(store: Store, numbers: range) -> None:
    """Reads as many token embeddings as there are numbers, in place of the rows of tokens that a trace does not name;
    equal numbers read equal rows, spread over the vocabulary."""
    if store.num_rows and numbers:
        step = round(store.num_rows * (5**0.5 - 1) / 2)
        store.read_rows(np.array(numbers) * step % store.num_rows)


class Checked:
    """Passes the events of a trace on, refuses those for units that the artifact does not have, and counts tokens."""

    def __init__(self, artifact: Artifact) -> None:
        sections = artifact.manifest.flash.sections
        self._known = {(layer, section.family): section.num_units for section in sections for layer in section.layers}
        self._vocab_size = artifact.manifest.model.vocab_size
        self._num_events = self._first_token = self._last_token = 0
        self._passes = set[int]()

    @property
    def num_tokens(self) -> int:
        return self._last_token - self._first_token

    @property
    def num_passes(self) -> int:
        """Returns the passes since counting began: tokens that are decoded together make one."""
        return len(self._passes)

    def start_counting(self) -> None:
        self._first_token, self._passes = self._last_token, set[int]()

    def __call__(self, trace: Iterable[Event]) -> Iterator[Event]:
        """Yields the events of the trace, or of its next part. Raises `ColdpressError` naming the first event that is
        refused."""
        for event in trace:
            num_units = self._known.get((event.layer, event.family), 0)
            largest = int(event.ids[-1]) if event.ids.size else 0
            if event.kind == ROWS and largest >= self._vocab_size:
                raise ColdpressError(
                    f"event {self._num_events} of the trace asks for the embedding of token {largest}, where the "
                    f"artifact has {self._vocab_size}; use a trace recorded with this artifact's model"
                )
            if event.kind in (STREAM, FETCH, PRELOAD) and largest >= num_units:
                raise ColdpressError(
                    f"event {self._num_events} of the trace asks for unit {largest} of layer {event.layer}, family "
                    f"{event.family}, where the artifact has {num_units} units; use a trace recorded with this "
                    "artifact's model and method"
                )
            self._num_events += 1
            self._last_token = max(self._last_token, event.token)
            if event.kind == FETCH:
                self._passes.add(event.token)
            yield event
