"""Chooses how much of the units' DRAM is pinned and how much is left to the dynamic cache, by replaying tokens.

For each candidate share the placement is made from the first tokens, and the plan's own cache policy (runtime/cache)
runs over windows of the held-out tokens; compiler/seconds.py turns misses into reads and seconds. Units lie in natural
order, since the order on flash is found after the placement, and requests have the whole read buffer; all shares are
compared under the same order and buffer. The smallest share that costs nearly the least wins: a cache adapts to a text
that differs from the calibration text, pinned units do not.

Dense runs need no program: every token uses every unit, so all units are worth the same. Then only layers that are not
read at all save time: a layer that misses one unit still waits for its first byte. `whole_layers` pins layers from the
first on, and the next one as far as it fits; no placement has a larger objective (Eq. 2), since all counts are equal
and the bytes left are too few for a unit. For a mixture whose experts are used whole this is one candidate: some
experts are used more often than others, which other placements and caches exploit. Where the next layer's units are
read ahead while a layer computes, nothing waits for a first byte: then every layer has as many pinned units (`evenly`),
so that all of them read and compute for equally long.
"""

from collections.abc import Sequence

import numpy as np

from coldpress.compiler.activity.held_out import Trace
from coldpress.compiler.cost_model import PEAK_READ_BYTES
from coldpress.compiler.seconds import Reading
from coldpress.compiler.stages.place._program import Choice, Group, Problem, is_pinned, units_of
from coldpress.runtime.cache import CachePolicy, Known, make
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.plan.budget import Claim, cache_slots
from coldpress.runtime.store.planner import Strided
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.placement import PinnedShare
from coldpress.schemas.sparsity import Sparsity

SHARES = tuple(tenth / 10 for tenth in range(11))
NEARLY = 1.03
"""Costs within this factor of the least count as the same. With counts of one corpus and tokens of another, the share
of least cost was up to 3.1 % dearer than the best, the smallest of those within 3 % up to 1.7 %
(docs/experiments/cache.md)."""


def choose_share(tried: Sequence[PinnedShare]) -> float:
    least = min(entry.flash_s_per_token for entry in tried)
    return min(entry.share for entry in tried if entry.flash_s_per_token <= NEARLY * least)


def replay(
    problem: Problem, choices: Sequence[Choice], sparsity: Sparsity, device: DeviceProfile, traces: tuple[Trace, ...]
) -> float:
    """Returns modelled flash seconds of a token over all layers, scaled up from the layers that have traces."""
    pinned = [np.flatnonzero(is_pinned(*pair)) for pair in zip(problem.groups, choices, strict=True)]
    claims = [
        Claim(sparsity.density(group.family, group.layer), group.units.size, group.unit_bytes, ids.size)
        for group, ids in zip(problem.groups, pinned, strict=True)
    ]
    slots = cache_slots(sparsity.cache, claims, sparsity.budget.cache_bytes)
    known = {(group.layer, group.family): number for number, group in enumerate(problem.groups)}
    total = 0.0
    for trace in traces:
        number = known[trace.layer, trace.family]
        group = problem.groups[number]
        size = group.units.size
        cache = make(
            sparsity.cache, sparsity.cache_options, Known(size, slots[number], pinned[number], np.arange(size))
        )
        total += _flash_seconds(cache, _reading(group, sparsity, device), trace) / trace.num_measured
    return total * len(problem.groups) / len(traces)


def whole_layers_seconds(
    problem: Problem, choices: Sequence[Choice], sparsity: Sparsity, device: DeviceProfile, traces: tuple[Trace, ...]
) -> float:
    """Returns modelled flash seconds of a token if some layers are pinned whole and the others are not cached. An upper
    bound: all units of a partly pinned layer count as read."""
    groups = {(group.layer, group.family): group for group in problem.groups}
    read = dict.fromkeys((group.family for group in problem.groups), 0)
    for group, choice in zip(problem.groups, choices, strict=True):
        read[group.family] += units_of(group, choice) < group.units.size
    total = 0.0
    for family, num_read in read.items():
        of_family = [trace for trace in traces if trace.family == family]
        for trace in of_family:
            group = groups[trace.layer, family]
            size = group.units.size
            nothing = make("static", {}, Known(size, 0, np.zeros(0, np.int64), np.arange(size)))
            seconds = _flash_seconds(nothing, _reading(group, sparsity, device), trace) / trace.num_measured
            total += seconds * num_read / len(of_family)
    return total


def _reading(group: Group, sparsity: Sparsity, device: DeviceProfile) -> Reading:
    """Describes reads of units in natural order; a unit's stride is the parts of all layers of its group."""
    num_layers = len(sparsity.densities[0].per_layer)  # some may have no units
    layers = next(found for found in sparsity.groups(num_layers) if group.layer in found)
    units = Strided(0, group.unit_bytes, len(layers) * group.unit_bytes)
    page_bytes = device.flash.page_bytes.value
    buffer_bytes = max(PEAK_READ_BYTES, 2 * span_bytes(group.unit_bytes, page_bytes))
    return Reading(device.flash, units, device.flash.break_even_gap_bytes, buffer_bytes)


def _flash_seconds(cache: CachePolicy, reading: Reading, trace: Trace) -> float:
    seconds = 0.0
    for context in trace.contexts:
        cache.reset()
        for token_s in reading.replay(cache, context.ids, context.num_warm):
            seconds += token_s
    return seconds


def whole_layers(problem: Problem) -> tuple[Choice, ...]:
    """Pins groups from the first on; a group takes as many batches as fit, and none if that is below C_l (Eq. 7)."""
    room, choices = problem.dram_bytes, []
    for group in problem.groups:
        choice = _fitting(group, room)
        choice = choice if units_of(group, choice) >= group.min_units else Choice(0, False)
        room -= units_of(group, choice) * group.unit_bytes
        choices.append(choice)
    return tuple(choices)


def evenly(problem: Problem) -> tuple[Choice, ...]:
    """Pins as many units in each group, with an equal share of the DRAM for each."""
    count, used, choices = len(problem.groups), 0, []
    for number, group in enumerate(problem.groups, 1):
        choices.append(_fitting(group, problem.dram_bytes * number // count - used))
        used += units_of(group, choices[-1]) * group.unit_bytes
    return tuple(choices)


def _fitting(group: Group, room_bytes: int) -> Choice:
    """Takes as many batches as fit, and the remainder if the whole group does."""
    batches = min(group.num_batches, room_bytes // group.batch_bytes)
    whole = group.units.size * group.unit_bytes <= room_bytes
    return Choice(batches, whole and group.rest_units > 0)
