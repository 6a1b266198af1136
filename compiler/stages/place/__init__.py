"""Decides which units stay in DRAM: PowerInfer's integer program with all its constraints (6, Eqs. 1-8).

How much of the units' DRAM is pinned and how much is left to the dynamic cache is decided by replaying tokens: for each
candidate share the placement is made from the first tokens, and the plan's own cache policy (runtime/cache) runs over
windows of the held-out ones; compiler/seconds.py turns misses into reads and seconds. Units lie in natural order, since
the order on flash is found after the placement, and all shares have the same order and read buffer. The smallest share
that costs nearly the least wins: a cache adapts to a text that differs from the calibration text, pinned units do not.

Dense runs need no program (_program.py): every token uses every unit, so all units are worth the same. Then only layers
that are not read at all save time: a layer that misses one unit still waits for its first byte (`whole_layers`); no
placement has a larger objective (Eq. 2), since all counts are equal and the bytes left are too few for a unit. For a
mixture whose experts are used whole this is one candidate: some experts are used more often than others, which other
placements and caches exploit. Where the next layer's units are preloaded while a layer computes, nothing waits for a
first byte: then every layer has as many pinned units (`evenly`), so that all of them read and compute for equally long.
"""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.choice import REPLAYED_LAYERS
from coldpress.compiler.activity.held_out import (
    MAX_WINDOWS,
    WARM_TOKENS,
    WINDOW_TOKENS,
    Trace,
    activity,
    always_used,
    split_tokens,
    traces_of,
)
from coldpress.compiler.activity.packed_bits import population
from coldpress.compiler.cost_model import PEAK_READ_BYTES, unit_bytes
from coldpress.compiler.dense_run import buffers_of
from coldpress.compiler.io import Workspace
from coldpress.compiler.seconds import Reading
from coldpress.compiler.shared_settings import PinnedShareSetting
from coldpress.compiler.stages.place._program import (
    Group,
    Problem,
    UnitChoice,
    bytes_of,
    is_pinned,
    make_group,
    min_units,
    rank_of,
    search,
    units_of,
    value_of,
)
from coldpress.runtime.cache import CacheFacts, CachePolicy, make
from coldpress.runtime.dram.budget import Claim, cache_slots
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.plugins import load_class
from coldpress.runtime.quantization._mixed import format_at
from coldpress.runtime.store.planner import Strided
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import PositiveCount
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName, num_units, unit_keys, used_share
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.placement import LayerPlacement, PinnedShare, Placement
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
UNIT_RECORD_BYTES = 128
"""Bytes per unit while units are placed: frequency, value, place, and its share of the solver's rows."""
MAX_BATCH_UNITS = 64
SINGLE_UNIT_ITEMS = 16384
"""Models with at most this many units are solved unit by unit; batches only save solver time (6.3.3)."""
PLACE_GAP = 1e-5
"""Relative distance to the optimum at which placing ends."""
SHARE_GAP = 1e-3
"""Relative gap that is close enough to the optimum for comparing shares."""
Counts = dict[tuple[int, FamilyName], np.ndarray]
"""Impact of the units per layer and family (Eq. 1): the tokens that use each, int64 [num_units]."""
SHARES = tuple(tenth / 10 for tenth in range(11))
NEARLY = 1.03
"""Costs within this factor of the least count as equal. With counts of one corpus and tokens of another, the share of
least cost was up to 3.1 % above the optimum, the smallest share within 3 % up to 1.7 % (docs/experiments/cache.md)."""


class PlaceConfig(PinnedShareSetting):
    batch_units: PositiveCount | None = Field(
        default=None, description="units of similar impact that are placed together"
    )


def run(
    config: PlaceConfig,
    model: Model,
    activations: Activations,
    sparsity: Sparsity,
    device: DeviceProfile,
    work: Workspace,
) -> Placement:
    """Solves the placement of all layers and families at once; raises ColdpressError if counts are missing, or DRAM is
    not faster than flash."""
    sparsity = sparsity.smallest
    counts = counts_of(model.spec, activations, sparsity, activations.num_tokens)
    share, whole, tried = _pinned_share(config, model.spec, activations, sparsity, device)
    problem = _problem(config, model.spec, counts, sparsity, device, share)
    choices, gap = _choices(problem, whole, whole and _preloads(model, sparsity, device))
    pairs = list(zip(problem.groups, choices, strict=True))
    value = sum(value_of(*pair) for pair in pairs)
    placement = Placement(
        solver="pulp_highs",
        layers=tuple(_layer_placement(*pair) for pair in pairs),
        arrays=work.once("placement", lambda: _arrays(pairs)),
        objective=value / activations.num_tokens,
        gap=gap,
        pinned_bytes=sum(bytes_of(*pair) for pair in pairs),
        pinned_share=share,
        shares_tried=tried,
    )
    LOG.info(
        "place: %s of %s bytes in DRAM, %.1f %% of all activations",
        f"{placement.pinned_bytes:,}",
        f"{problem.dram_bytes:,}",
        100 * value / max(1, sum(int(values.sum()) for values in counts.values())),
    )
    return placement


def needs(build: "Build") -> StageNeeds:
    layers, units = build.model.spec.num_hidden_layers, build.layer_units(build.families)
    tokens = min(MAX_WINDOWS * (WINDOW_TOKENS + WARM_TOKENS), build.num_tokens)
    replayed = 8 * tokens * units * min(REPLAYED_LAYERS, layers)
    ram_bytes = build.PYTHON_BYTES + layers * units * UNIT_RECORD_BYTES + replayed
    return StageNeeds(stage="place", ram_bytes=ram_bytes, disk_bytes=layers * units)


def counts_of(spec: ModelSpec, activations: Activations, sparsity: Sparsity, num_tokens: int) -> Counts:
    """Counts the uses of each unit by the first `num_tokens` tokens; at density 1, every token uses all units. Raises
    ColdpressError if a family below density 1 was not counted."""
    found: Counts = {}
    for layer, family in unit_keys(sparsity.families, spec):
        if always_used(sparsity, layer, family):
            found[layer, family] = np.full(num_units(family, spec), num_tokens, np.int64)
        elif num_tokens == activations.num_tokens:
            found[layer, family] = activity(activations, layer, family, "counts").astype(np.int64)
        else:
            bits = activity(activations, layer, family, "bits")[:, : -(-num_tokens // 8)].copy()
            if num_tokens % 8:
                bits[:, -1] &= (1 << num_tokens % 8) - 1
            found[layer, family] = population(bits)
    return found


def _arrays(pairs: list[tuple[Group, UnitChoice]]) -> dict[str, np.ndarray]:
    places = {f"{group.layer}.{group.family}": (~is_pinned(group, choice)).astype(np.int8) for group, choice in pairs}
    return places | {f"rank.{group.layer}.{group.family}": rank_of(group, choice) for group, choice in pairs}


def _choices(problem: Problem, whole: bool, preloads: bool) -> tuple[Sequence[UnitChoice], float]:
    """Returns each group's pinned units and the proven gap; `preloads`: whether a next layer's units are preloaded."""
    if whole:
        return evenly(problem) if preloads else whole_layers(problem), 0.0
    solution = search(problem, PLACE_GAP)
    return solution.choices, solution.gap


def _problem(
    config: PlaceConfig, spec: ModelSpec, counts: Counts, sparsity: Sparsity, device: DeviceProfile, share: float
) -> Problem:
    total = sum(values.size for values in counts.values())
    batch_units = config.batch_units or (1 if total <= SINGLE_UNIT_ITEMS else MAX_BATCH_UNITS)
    groups: list[Group] = []
    for (layer, family), values in sorted(counts.items()):
        size = unit_bytes(family, spec, format_at(sparsity.formats, layer, family))
        groups.append(make_group(layer, family, values, size, min_units(size, device), batch_units))
    return Problem(tuple(groups), math.floor(share * sparsity.budget.cache_bytes))


def _pinned_share(
    config: PlaceConfig, spec: ModelSpec, activations: Activations, sparsity: Sparsity, device: DeviceProfile
) -> tuple[float, bool, tuple[PinnedShare, ...]]:
    """Returns the pinned share of the units' DRAM, whether whole layers are pinned, and all shares that were tried."""
    admits = load_class("coldpress.runtime.cache", CachePolicy, sparsity.cache).admits
    if config.pinned_share is not None:
        return config.pinned_share, sparsity.is_whole, ()
    if not admits or sparsity.is_whole:  # the policy caches nothing, or every token uses every unit: pin all that fits
        return 1.0, sparsity.is_whole, ()
    head, windows = split_tokens(activations.num_tokens)
    counts = counts_of(spec, activations, sparsity, head)
    traces = traces_of(spec, activations, sparsity, windows)
    tried: list[PinnedShare] = []
    for share in SHARES:
        problem = _problem(config, spec, counts, sparsity, device, share)
        choices = search(problem, SHARE_GAP).choices
        seconds = replay(problem, choices, sparsity, device, traces)
        tried.append(PinnedShare(share=share, flash_s_per_token=seconds))
        LOG.info("place: %3.0f %% of the units' DRAM pinned: %.4g s of flash a token", 100 * share, seconds)
    share = choose_share(tried)
    if _experts_are_whole(spec, sparsity):
        problem = _problem(config, spec, counts, sparsity, device, 1.0)
        seconds = whole_layers_seconds(problem, sparsity, device, traces)
        LOG.info("place: whole layers pinned: %.4g s of flash a token", seconds)
        if seconds < next(entry.flash_s_per_token for entry in tried if entry.share == share):
            return 1.0, True, tuple(tried)
    return share, False, tuple(tried)


def _preloads(model: Model, sparsity: Sparsity, device: DeviceProfile) -> bool:
    """Tells whether a run in which every token uses every unit preloads the next layer's."""
    free_bytes = sparsity.budget.buffer_bytes + sparsity.budget.cache_bytes
    return buffers_of(model, sparsity, free_bytes, device).preload > 0


def _experts_are_whole(spec: ModelSpec, sparsity: Sparsity) -> bool:
    shares = ((used_share(found.family, spec), found.per_layer) for found in sparsity.densities)
    return spec.is_mixture and all(density == used for used, per_layer in shares for density in per_layer)


def _layer_placement(group: Group, choice: UnitChoice) -> LayerPlacement:
    pinned = units_of(group, choice)
    return LayerPlacement(layer=group.layer, family=group.family, num_pinned=pinned, min_pinned=group.min_units)


def choose_share(tried: Sequence[PinnedShare]) -> float:
    least = min(entry.flash_s_per_token for entry in tried)
    return min(entry.share for entry in tried if entry.flash_s_per_token <= NEARLY * least)


def replay(
    problem: Problem,
    choices: Sequence[UnitChoice],
    sparsity: Sparsity,
    device: DeviceProfile,
    traces: tuple[Trace, ...],
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
            sparsity.cache, sparsity.cache_options, CacheFacts(size, slots[number], pinned[number], np.arange(size))
        )
        total += _flash_seconds(cache, _reading(group, sparsity, device), trace) / trace.num_measured
    return total * len(problem.groups) / len(traces)


def whole_layers_seconds(
    problem: Problem, sparsity: Sparsity, device: DeviceProfile, traces: tuple[Trace, ...]
) -> float:
    """Returns modelled flash seconds of a token if some layers are pinned whole and the others are not cached. An upper
    bound: all units of a partly pinned layer count as read."""
    groups = {(group.layer, group.family): group for group in problem.groups}
    read = dict.fromkeys((group.family for group in problem.groups), 0)
    for group, choice in zip(problem.groups, whole_layers(problem), strict=True):
        read[group.family] += units_of(group, choice) < group.units.size
    total = 0.0
    for family, num_read in read.items():
        of_family = [trace for trace in traces if trace.family == family]
        for trace in of_family:
            group = groups[trace.layer, family]
            size = group.units.size
            nothing = make("static", {}, CacheFacts(size, 0, np.zeros(0, np.int64), np.arange(size)))
            seconds = _flash_seconds(nothing, _reading(group, sparsity, device), trace) / trace.num_measured
            total += seconds * num_read / len(of_family)
    return total


def _reading(group: Group, sparsity: Sparsity, device: DeviceProfile) -> Reading:
    """Describes reads of units in natural order; the stride spans a unit's parts for all layers of its group."""
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


def whole_layers(problem: Problem) -> tuple[UnitChoice, ...]:
    """Pins groups from the first on; a group takes as many batches as fit, and none if that is below C_l (Eq. 7)."""
    room, choices = problem.dram_bytes, []
    for group in problem.groups:
        choice = _fitting(group, room)
        choice = choice if units_of(group, choice) >= group.min_units else UnitChoice(0, False)
        room -= units_of(group, choice) * group.unit_bytes
        choices.append(choice)
    return tuple(choices)


def evenly(problem: Problem) -> tuple[UnitChoice, ...]:
    """Gives each group an equal share of the DRAM, and pins as many units as fit."""
    count, used, choices = len(problem.groups), 0, []
    for number, group in enumerate(problem.groups, 1):
        choices.append(_fitting(group, problem.dram_bytes * number // count - used))
        used += units_of(group, choices[-1]) * group.unit_bytes
    return tuple(choices)


def _fitting(group: Group, room_bytes: int) -> UnitChoice:
    """Takes as many batches as fit, and the remainder if the whole group does."""
    batches = min(group.num_batches, room_bytes // group.batch_bytes)
    whole = group.units.size * group.unit_bytes <= room_bytes
    return UnitChoice(batches, whole and group.rest_units > 0)
