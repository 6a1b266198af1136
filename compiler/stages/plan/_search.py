"""Settles a plan's cache, collapse gap, pinned share and read buffer, one after another, by seconds of held-out tokens.

A change is kept only if it makes a token clearly faster, and all of them only if they do so on other windows, too. So a
plan is never slower than the default one: lfu, the gap that `order` found, the units that `place` pins.

Tokens are decoded on the simulated device (compiler/seconds.py), with full caches. Only the units of the smallest plan
were recorded: a plan of another density gets as many, drawn at random, which is the worst case for caches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from coldpress.compiler import seconds
from coldpress.compiler.activity.held_out import Context, Trace, Window, split_tokens, traces_of
from coldpress.compiler.candidates import AUTO, caches_for, own_cache_options
from coldpress.compiler.cost_model import PEAK_READ_BYTES
from coldpress.compiler.seconds import FILLING, WORTH, Setting, filling_requests
from coldpress.compiler.shared_settings import CacheSetting, DraftSetting, PinnedShareSetting
from coldpress.compiler.stages.plan._slot_shares import Division, SlotSettings
from coldpress.runtime.cache import CachePolicy, show_choice
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.plugins import load_class
from coldpress.runtime.quantities import show_number
from coldpress.runtime.store.preload_room import scattered
from coldpress.runtime.trace import NO_IDS, RESET, Event
from coldpress.schemas.activations import Activations
from coldpress.schemas.config import Key
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import num_units
from coldpress.schemas.layout import Collapse, Plan, Section
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.plans import TriedSetting
from coldpress.schemas.sparsity import Sparsity

WORTH_SLOTS = 0.9
"""As WORTH, for a read buffer in place of slots: slots also let a router prefer experts in DRAM (stages/route)."""
NEARLY = 1.1
"""Of the gaps that cost at most this times the least in `order`, the smallest, a middle and the largest are tried."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Pinned shares that are tried beside the units that `place` pins."""
Change = tuple[str, SlotSettings]
"""A change in words, and the settings with it."""
WARM_TOKENS = 32
"""Tokens before each window that are not counted: fewer than `place` has, since caches are full before them."""


@dataclass(frozen=True)
class MeasuredPlan:
    token_s: float
    hit_rate: float


@dataclass(frozen=True)
class PlanInputs:
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
    def _orders(self) -> dict[seconds.Key, np.ndarray]:
        return seconds.built_orders(self.order)

    @cached_property
    def _ranks(self) -> dict[seconds.Key, np.ndarray]:
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

    known: PlanInputs
    sparsity: Sparsity
    windows: tuple[Window, ...]

    @cached_property
    def _traces(self) -> tuple[Trace, ...]:
        return self.known.traces(self.sparsity, self.windows)

    def measure(self, plan: Plan) -> MeasuredPlan:
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
        return MeasuredPlan(total_s / num_tokens, hits / max(1, lookups))


def filling(setting: Setting) -> list[Event]:
    """Requests all units of a plan's parts once, as tokens from 1 on, and then begins a new context."""
    keys = [(part.layer, part.family) for part in setting.plan.parts]
    requests = zip(*(filling_requests(setting.artifact.rank(*key)) for key in keys), strict=True)
    tokens = [dict(zip(keys, ids, strict=True)) for ids in requests]
    return [*seconds.requests_of(tokens), Event(RESET, 0, 0, setting.sections[0].family, NO_IDS)]


def as_dense_as(trace: Trace, recorded: Sparsity, wanted: Sparsity, spec: ModelSpec) -> Trace:
    """Returns a trace with as many units as `wanted` would use: some recorded ones, or all and others at random."""
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


def replays(known: PlanInputs, sparsity: Sparsity) -> tuple[Replay, Replay]:
    """Returns the held-out tokens that settings are chosen on, and those that confirm them; one window alone does both.
    `known` has activations of two tokens at least."""
    assert known.activations is not None
    _, found = split_tokens(known.activations.num_tokens)
    windows = tuple(replace(each, start=max(each.start, each.measured - WARM_TOKENS)) for each in found)
    return Replay(known, sparsity, windows[::2]), Replay(known, sparsity, windows[1::2] or windows)


@dataclass
class Found:
    settings: SlotSettings
    measured: MeasuredPlan | None = None
    default_s: float | None = None
    tried: list[TriedSetting] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class PlanConfig(CacheSetting, PinnedShareSetting, DraftSetting):
    collapse: Annotated[Collapse, Key()] = Field(
        default="static",
        description="whether reads are joined over the gap that is best for the device, or over one that the runtime "
        "finds while it runs, beginning there; static for a selector with use_read_units, whose tokens would depend on "
        "measured seconds",
    )
    preload: Annotated[Literal["off", "on", "auto"], Key()] = Field(
        default="off",
        description="whether what later layers will probably use is read while earlier ones compute; auto: where the "
        "device's law and the measured likeness of layers say that it pays; a plan that uses every unit has nothing to "
        "guess, and preloads wherever that is faster",
    )


def search(
    division: Division, start: SlotSettings, given: PlanConfig, order: Sequence[Order], replays: tuple[Replay, Replay]
) -> Found:
    """Searches all settings that are not `given`; chooses on the first of `replays`, confirms on the second."""
    choosing, confirming = replays
    measured = choosing.measure(division.plan(start))
    found = Found(start, measured, measured.token_s)
    steps: tuple[tuple[str, Callable[[SlotSettings], Iterable[Change]]], ...] = (
        ("cache", lambda now: _caches(now, given)),
        ("gap", lambda now: _gaps(now, order)),
        ("pinned units", lambda now: _shares(now, given)),
        ("read buffer", lambda now: _buffers(now, division)),
    )
    for name, changes in steps:
        _step(found, name, list(changes(found.settings)), division, choosing)
    _step(found, "slots", list(_largest_buffer(found.settings, given, division)), division, choosing, WORTH_SLOTS)
    if given.cache != AUTO:
        found.reasons.insert(0, f"cache {show_choice(given.cache, given.cache_options)}, as given")
    if given.pinned_share is not None:
        found.reasons.append(f"{given.pinned_share:.0%} of the units' DRAM pinned, as given")
    _confirm(found, start, division, confirming, choosing)
    return found


def _step(
    found: Found, name: str, changes: list[Change], division: Division, replay: Replay, worth: float = WORTH
) -> None:
    """Tries changes to one setting, and keeps the best of them if it takes less than a share `worth` of the time."""
    now_plan, now = division.plan(found.settings), found.measured
    assert now is not None
    plans: dict[str, tuple[SlotSettings, Plan]] = {}
    for words, settings in changes:
        plan = division.plan(settings)
        if division.unpinned_bytes(settings) >= 0 and plan != now_plan:
            plans[words] = settings, plan
    if not plans:
        return
    measured = {words: replay.measure(plan) for words, (_, plan) in plans.items()}
    best = min(measured, key=lambda words: measured[words].token_s)
    kept = measured[best].token_s < worth * now.token_s
    found.tried += [
        TriedSetting(setting=words, token_s=result.token_s, kept=kept and words == best)
        for words, result in measured.items()
    ]
    figures = f"{_ms(measured[best].token_s)} a token, {_ms(now.token_s)} without"
    if kept:
        found.settings, found.measured = plans[best][0], measured[best]
        found.reasons.append(f"{best}: {figures}")
    else:
        others = "the only change" if len(plans) == 1 else f"the best of {len(plans)} changes"
        found.reasons.append(f"{name} as by default: {others}, {best}, takes {figures}")


def _confirm(found: Found, start: SlotSettings, division: Division, other: Replay, same: Replay) -> None:
    """Takes all changes back if they are not faster on other tokens than they were chosen on."""
    if found.settings == start:
        return
    before, after = other.measure(division.plan(start)), other.measure(division.plan(found.settings))
    figures = f"{_ms(after.token_s)} instead of {_ms(before.token_s)}"
    if after.token_s < before.token_s:
        found.reasons.append(f"on other tokens the changes take {figures}")
        return
    found.reasons.append(f"all changes are taken back: on other tokens they take {figures}")
    found.settings, found.measured = start, same.measure(division.plan(start))
    found.tried = [entry.model_copy(update={"kept": False}) for entry in found.tried]


def _caches(now: SlotSettings, given: PlanConfig) -> Iterable[Change]:
    if given.cache == AUTO:
        for name in filter(_admits, caches_for(AUTO)):
            options = own_cache_options(name, given.cache_options)
            yield f"cache {show_choice(name, options)}", replace(now, cache=name, cache_options=options)


def _gaps(now: SlotSettings, order: Sequence[Order]) -> Iterable[Change]:
    costs = gap_costs(order)
    least = min(costs.values(), default=0.0)
    near = sorted(gap for gap, cost in costs.items() if cost <= NEARLY * least)
    for gap_bytes in dict.fromkeys([*near[:1], *near[len(near) // 2 :][:1], *near[-1:]]):
        yield f"gap of {gap_bytes} bytes", replace(now, gap_bytes=gap_bytes)


def _shares(now: SlotSettings, given: PlanConfig) -> Iterable[Change]:
    if given.pinned_share is None and _admits(now.cache):
        for share in SHARES:
            yield f"{share:.0%} of the units' DRAM pinned in every part", replace(now, pinned_share=share)


def _buffers(now: SlotSettings, division: Division) -> Iterable[Change]:
    page_bytes = division.device.flash.page_bytes.value
    least = max(span_bytes(section.unit_bytes, page_bytes) for section in division.sections)
    for size in (now.read_buffer_bytes // 2 // page_bytes * page_bytes, *(n * now.read_buffer_bytes for n in (2, 4))):
        if least <= size <= PEAK_READ_BYTES:
            yield f"read buffer of {size} bytes", replace(now, read_buffer_bytes=size)


def _largest_buffer(now: SlotSettings, given: PlanConfig, division: Division) -> Iterable[Change]:
    """Offers a buffer that holds a whole request: with little DRAM it may be worth more than slots and bookkeeping."""
    page_bytes = division.device.flash.page_bytes.value
    changes = [("", now), *((f"{words} and ", settings) for words, settings in _caches(now, given))]
    roomiest, settings = max(changes, key=lambda change: division.unpinned_bytes(change[1]))
    size = (now.read_buffer_bytes + division.unpinned_bytes(settings)) // page_bytes * page_bytes
    if size <= PEAK_READ_BYTES:
        yield f"{roomiest}the largest read buffer, {size} bytes", replace(settings, read_buffer_bytes=size)


def _admits(cache: str) -> bool:
    return load_class("coldpress.runtime.cache", CachePolicy, cache).admits


def gap_costs(order: Sequence[Order]) -> dict[int, float]:
    """Returns the modelled flash seconds of a token under each gap, over all sections; `order` counts active units."""
    seconds: dict[int, float] = {}
    for entry in (entry for part in order for entry in part.entries):
        for cost in entry.gap_costs:
            seconds[cost.gap_bytes] = seconds.get(cost.gap_bytes, 0.0) + cost.flash_s_per_token
    return seconds


def _ms(seconds: float) -> str:
    return f"{show_number(1e3 * seconds, 4)} ms"
