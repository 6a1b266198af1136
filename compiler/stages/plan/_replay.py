"""Decodes held-out calibration tokens on the simulated device (compiler/seconds.py) under a plan, with the build's own
placement and order.

Four layers stand for all. Caches are full before a token counts. Only the units of the smallest plan were recorded: a
plan of another density is given as many of them as it would use, drawn at random, which is the worst case for caches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from coldpress.compiler import seconds
from coldpress.compiler.activity.held_out import Context, Trace, Window, split_tokens, traces_of
from coldpress.compiler.seconds import FILLING, Key, Setting, filling_requests
from coldpress.runtime.store.ahead_room import scattered
from coldpress.runtime.trace import END, FETCH, NO_IDS, RESET, Event
from coldpress.schemas.activations import Activations
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import num_units
from coldpress.schemas.layout import Plan, Section
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.sparsity import Sparsity

WARM_TOKENS = 32
"""Tokens before each window that are not counted: fewer than `place` has, since caches are full before them."""


@dataclass(frozen=True)
class Measured:
    token_s: float
    hit_rate: float


@dataclass(frozen=True)
class Known:
    model: Model
    recorded: Sparsity
    """The choice whose units `activations` has."""
    sections: tuple[Section, ...]
    device: DeviceProfile
    placement: Placement
    order: Sequence[Order]
    activations: Activations | None

    def setting(self, plan: Plan) -> Setting:
        model, recorded = self.model, self.recorded
        return Setting(model, recorded.formats, self.device, self.sections, plan, self._orders, self._ranks)

    @cached_property
    def _orders(self) -> dict[Key, np.ndarray]:
        return seconds.built_orders(self.order)

    @cached_property
    def _ranks(self) -> dict[Key, np.ndarray]:
        return seconds.built_ranks(self.placement, self.sections)

    def traces(
        self, sparsity: Sparsity, windows: tuple[Window, ...], layers: Iterable[int] | None = None
    ) -> tuple[Trace, ...]:
        assert self.activations is not None
        found = traces_of(self.model.spec, self.activations, self.recorded, windows, layers)
        return tuple(as_dense_as(trace, self.recorded, sparsity, self.model.spec) for trace in found)


@dataclass(frozen=True)
class Replay:
    """Windows of held-out tokens, to measure plans of one density on."""

    known: Known
    sparsity: Sparsity
    windows: tuple[Window, ...]

    @cached_property
    def _traces(self) -> tuple[Trace, ...]:
        return self.known.traces(self.sparsity, self.windows)

    def measure(self, plan: Plan) -> Measured:
        """Returns the cost of a token under a plan; the requests of four layers stand for those of all."""
        kept = {(trace.layer, trace.family) for trace in self._traces}
        parts = tuple(part for part in plan.parts if (part.layer, part.family) in kept)
        setting = self.known.setting(plan.model_copy(update={"parts": parts, "preload_buffer_bytes": 0}))
        full = filling(setting)
        total_s, num_tokens, hits, lookups = 0.0, 0, 0, 0
        for number in range(len(self.windows)):
            contexts = {(trace.layer, trace.family): trace.contexts[number] for trace in self._traces}
            num_warm = next(iter(contexts.values())).num_warm
            tokens = [
                dict(zip(contexts, ids, strict=True))
                for ids in zip(*(context.ids for context in contexts.values()), strict=True)
            ]
            before = [*full, *seconds.requests_of(tokens[:num_warm], 1 + FILLING)]
            trace = seconds.requests_of(tokens[num_warm:], 1 + FILLING + num_warm)
            found = seconds.simulated(setting, trace, before)
            total_s += seconds.of_all_layers(setting, found) * found.num_tokens
            num_tokens += found.num_tokens
            hits, lookups = hits + found.hits, lookups + found.hits + found.misses
        return Measured(total_s / num_tokens, hits / max(1, lookups))


def filling(setting: Setting) -> list[Event]:
    """Requests all units of a plan's parts once, as tokens from 1 on, and then begins a new context."""
    found: list[Event] = []
    family = setting.sections[0].family
    parts = setting.plan.parts
    requests = [filling_requests(setting.artifact.rank(part.layer, part.family)) for part in parts]
    for number in range(FILLING):
        for part, ids in zip(parts, requests, strict=True):
            found.append(Event(FETCH, number + 1, part.layer, part.family, ids[number]))
        found.append(Event(END, number + 1, 0, family, NO_IDS))
    return [*found, Event(RESET, 0, 0, family, NO_IDS)]


def as_dense_as(trace: Trace, recorded: Sparsity, wanted: Sparsity, spec: ModelSpec) -> Trace:
    """Returns a trace with as many units as `wanted` would use: drawn from the recorded ones, or besides them."""
    before, after = (found.density(trace.family, trace.layer) for found in (recorded, wanted))
    if before == after:
        return trace
    units = num_units(trace.family, spec)

    def resized(ids: np.ndarray, token: int) -> np.ndarray:
        count = max(1, min(units, round(ids.size * after / before)))
        others = np.setdiff1d(np.arange(units), ids, assume_unique=True)
        shuffled = [group[np.argsort(scattered(group.size, token), kind="stable")] for group in (ids, others)]
        return np.sort(np.concatenate(shuffled)[:count])

    contexts = tuple(
        Context(tuple(resized(ids, token) for token, ids in enumerate(context.ids)), context.num_warm)
        for context in trace.contexts
    )
    return replace(trace, contexts=contexts)


def replays(known: Known, sparsity: Sparsity) -> tuple[Replay, Replay]:
    """Returns the held-out tokens that settings are chosen on, and those that confirm them; one window alone does both.
    `known` has activations of two tokens at least."""
    assert known.activations is not None
    _, found = split_tokens(known.activations.num_tokens)
    windows = tuple(replace(each, start=max(each.start, each.measured - WARM_TOKENS)) for each in found)
    return Replay(known, sparsity, windows[::2]), Replay(known, sparsity, windows[1::2] or windows)
