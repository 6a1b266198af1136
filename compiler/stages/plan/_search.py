"""Settles a plan's cache, collapse gap, pinned share and read buffer, one after another, by seconds of held-out tokens.

A change is kept only if it makes a token clearly faster, and all of them only if they do so on other windows, too. So a
plan is never slower than the default one: lfu, the gap that `order` found, the units that `place` pins.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from coldpress.compiler.candidates import AUTO, caches_for, own_cache_options
from coldpress.compiler.cost_model import PEAK_READ_BYTES
from coldpress.compiler.stages.plan._division import Division, Settings
from coldpress.compiler.stages.plan._replay import Measured, Replay
from coldpress.runtime.cache import CachePolicy, show_choice
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.plugins import load_class
from coldpress.runtime.quantities import show_number
from coldpress.schemas.base import Options
from coldpress.schemas.layout import Plan
from coldpress.schemas.order import Order
from coldpress.schemas.plans import TriedSetting

WORTH = 0.985
"""A change must bring a token's time below this share: other text differs from the calibration text."""
WORTH_SLOTS = 0.9
"""The same for a read buffer in place of slots, which also let a router prefer what is in DRAM (stages/route)."""
NEARLY = 1.1
"""The smallest, a middle and the largest of the gaps are tried that cost at most this times the least in `order`."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Pinned shares that are tried beside the units that `place` pins."""
Change = tuple[str, Settings]
"""A change in words, and the settings with it."""


@dataclass
class Found:
    settings: Settings
    measured: Measured | None = None
    default_s: float | None = None
    tried: list[TriedSetting] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Given:
    cache: str
    """A policy, or `auto`."""
    cache_options: Options
    pinned_share: float | None


def search(
    division: Division, start: Settings, given: Given, order: Sequence[Order], replays: tuple[Replay, Replay]
) -> Found:
    """Changes nothing that is `given`; chooses on the first tokens of `replays`, and confirms on the second ones."""
    choosing, confirming = replays
    measured = choosing.measure(division.plan(start))
    found = Found(start, measured, measured.token_s)
    steps: tuple[tuple[str, Callable[[Settings], Iterable[Change]]], ...] = (
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
    plans: dict[str, tuple[Settings, Plan]] = {}
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


def _confirm(found: Found, start: Settings, division: Division, other: Replay, same: Replay) -> None:
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


def _caches(now: Settings, given: Given) -> Iterable[Change]:
    if given.cache == AUTO:
        for name in filter(_admits, caches_for(AUTO)):
            options = own_cache_options(name, given.cache_options)
            yield f"cache {show_choice(name, options)}", replace(now, cache=name, cache_options=options)


def _gaps(now: Settings, order: Sequence[Order]) -> Iterable[Change]:
    costs = gap_costs(order)
    least = min(costs.values(), default=0.0)
    near = sorted(gap for gap, cost in costs.items() if cost <= NEARLY * least)
    for gap_bytes in dict.fromkeys([*near[:1], *near[len(near) // 2 :][:1], *near[-1:]]):
        yield f"gap of {gap_bytes} bytes", replace(now, gap_bytes=gap_bytes)


def _shares(now: Settings, given: Given) -> Iterable[Change]:
    if given.pinned_share is None and _admits(now.cache):
        for share in SHARES:
            yield f"{share:.0%} of the units' DRAM pinned in every part", replace(now, pinned_share=share)


def _buffers(now: Settings, division: Division) -> Iterable[Change]:
    page_bytes = division.device.flash.page_bytes.value
    least = max(span_bytes(section.unit_bytes, page_bytes) for section in division.sections)
    for size in (now.read_buffer_bytes // 2 // page_bytes * page_bytes, *(n * now.read_buffer_bytes for n in (2, 4))):
        if least <= size <= PEAK_READ_BYTES:
            yield f"read buffer of {size} bytes", replace(now, read_buffer_bytes=size)


def _largest_buffer(now: Settings, given: Given, division: Division) -> Iterable[Change]:
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
