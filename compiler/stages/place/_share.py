"""How much of the units' DRAM is pinned, and how much is left to the dynamic cache: decided by replaying tokens.

For each candidate share the placement is made from the first tokens, and the plan's own cache policy (runtime/cache)
runs over windows of the tokens held out; misses become reads by the runtime's own planner and seconds by the device
profile. Units lie in natural order, since the order on flash is found after the placement; all shares are compared
under the same order. Of shares that cost nearly the same the smallest is taken: a cache follows a text that is not like
the calibration's, pinned units do not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coldpress.compiler.stages.place._counts import Trace
from coldpress.compiler.stages.place._problem import Choice, Group, Problem, tiers_of
from coldpress.runtime.cache import Known, Policy, make
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.plan.budget import Claim, cache_slots
from coldpress.runtime.store import planner
from coldpress.runtime.store.reads import MAX_READ_BYTES
from coldpress.schemas.device import DeviceProfile, flash_seconds
from coldpress.schemas.placement import PinnedShare
from coldpress.schemas.sparsity import Sparsity

SHARES = tuple(tenth / 10 for tenth in range(11))
NEARLY = 1.03
"""Costs within this factor of the least count as the same. With counts of one corpus and tokens of another, the share
of least cost was up to 3.1 % dearer than the best, the smallest of those within 3 % up to 1.7 % (EXPERIMENTS.md)."""


def choose_share(tried: Sequence[PinnedShare]) -> float:
    """The smallest share whose flash time is nearly the least."""
    least = min(entry.flash_s_per_token for entry in tried)
    return min(entry.share for entry in tried if entry.flash_s_per_token <= NEARLY * least)


def replay(
    policy: str,
    options: Mapping[str, Any],
    problem: Problem,
    choices: tuple[Choice, ...],
    sparsity: Sparsity,
    device: DeviceProfile,
    traces: tuple[Trace, ...],
) -> float:
    """Modelled flash seconds of a token in all layers, from those that have traces."""
    pinned = [np.flatnonzero(tiers_of(*pair) < len(problem.fast_bytes)) for pair in _pairs(problem, choices)]
    claims = [
        Claim(sparsity.density(group.family, group.layer), group.units.size, group.unit_bytes, ids.size)
        for group, ids in zip(problem.groups, pinned, strict=True)
    ]
    slots = cache_slots(policy, claims, sparsity.budget.cache_bytes)
    known = {(group.layer, group.family): number for number, group in enumerate(problem.groups)}
    total = 0.0
    for trace in traces:
        number = known[trace.layer, trace.family]
        group = problem.groups[number]
        size = group.units.size
        cache = make(policy, options, Known(size, slots[number], pinned[number], np.arange(size)))
        units = _laid_out(group, sparsity, len(problem.groups) // len(sparsity.families))
        total += _flash_seconds(cache, units, trace, device) / trace.num_measured
    return total * len(problem.groups) / len(traces)


def whole_layers_seconds(
    problem: Problem, choices: tuple[Choice, ...], sparsity: Sparsity, device: DeviceProfile, traces: tuple[Trace, ...]
) -> float:
    """Modelled flash seconds of a token where some layers are pinned whole, and nothing of the others is cached: at
    most, since units of the layer that room ends in are not counted as pinned."""
    read = {group.family: 0 for group in problem.groups}
    for group, choice in _pairs(problem, choices):
        read[group.family] += bool((tiers_of(group, choice) == len(problem.fast_bytes)).any())
    each = {family: [trace for trace in traces if trace.family == family] for family in read}
    groups = {(group.layer, group.family): group for group in problem.groups}
    total = 0.0
    for family, of_family in each.items():
        for trace in of_family:
            group = groups[trace.layer, family]
            size = group.units.size
            nothing = make("static", {}, Known(size, 0, np.zeros(0, np.int64), np.arange(size)))
            units = _laid_out(group, sparsity, len(problem.groups) // len(sparsity.families))
            seconds = _flash_seconds(nothing, units, trace, device) / trace.num_measured
            total += seconds * read[family] / len(of_family)
    return total


def _pairs(problem: Problem, choices: tuple[Choice, ...]) -> list[tuple[Group, Choice]]:
    return list(zip(problem.groups, choices, strict=True))


def _laid_out(group: Group, sparsity: Sparsity, num_layers: int) -> planner.Strided:
    """A group's units in natural order, as far apart as its layer group has layers."""
    layers = next(found for found in sparsity.groups(num_layers) if group.layer in found)
    return planner.Strided(0, group.unit_bytes, len(layers) * group.unit_bytes)


def _flash_seconds(cache: Policy, units: planner.Strided, trace: Trace, device: DeviceProfile) -> float:
    flash, page_bytes = device.flash, device.flash.page_bytes.value
    gap_bytes = flash.break_even_gap_bytes
    max_bytes = max(MAX_READ_BYTES, span_bytes(units.unit_bytes, page_bytes))
    seconds = 0.0
    for context in trace.contexts:
        cache.reset()
        for token, ids in enumerate(context.ids):
            missing = ids[~cache.serve(ids)]
            if missing.size and token >= context.num_warm:
                extents = planner.plan_reads(units, missing, page_bytes, gap_bytes, max_bytes).extents
                seconds += float(flash_seconds(flash, len(extents), extents.num_bytes))
    return seconds
