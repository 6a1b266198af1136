"""Decides which units stay in DRAM: PowerInfer's integer program with all its constraints (6, Eqs. 1-8).

Reads activation counts and bits, the DRAM that `allocate` left for units, and the device's bandwidths; returns where
every unit is. How much of the DRAM is pinned and how much is left to the dynamic cache is decided by replaying held-out
tokens (_share). The program is in _program.py, and how it is solved in _search.py.
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
    activity,
    always_used,
    split_tokens,
    traces_of,
)
from coldpress.compiler.activity.packed_bits import population
from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.dense_run import buffers_of
from coldpress.compiler.io import Workspace
from coldpress.compiler.shared_settings import PinnedShareSetting
from coldpress.compiler.stages.place._program import (
    Choice,
    Group,
    Problem,
    bytes_of,
    is_pinned,
    make_group,
    min_units,
    rank_of,
    units_of,
    value_of,
)
from coldpress.compiler.stages.place._search import search
from coldpress.compiler.stages.place._share import (
    SHARES,
    choose_share,
    evenly,
    replay,
    whole_layers,
    whole_layers_seconds,
)
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.plugins import load_class
from coldpress.runtime.quantization._mixed import format_at
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
UNIT_S = 5e-5
"""Seconds per unit: 3 s for four layers of 14,336 (docs/experiments/builds.md)."""
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


class PlaceConfig(PinnedShareSetting):
    """Settings of `place`."""

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
    """Solves the placement of all layers and families at once.

    Raises:
        ColdpressError: if counts are missing, or DRAM is not faster than flash.
    """
    sparsity = sparsity.smallest
    counts = counts_of(model.spec, activations, sparsity, activations.num_tokens)
    share, whole, tried = _pinned_share(config, model.spec, activations, sparsity, device)
    problem = _problem(config, model.spec, counts, sparsity, device, share)
    choices, gap = _choices(problem, whole, whole and _reads_ahead(model, sparsity, device))
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
    """Counts a record per unit, and the units that each replayed token uses."""
    layers, units = build.model.spec.num_hidden_layers, build.layer_units(build.families)
    tokens = min(MAX_WINDOWS * (WINDOW_TOKENS + WARM_TOKENS), build.num_tokens)
    replayed = 8 * tokens * units * min(REPLAYED_LAYERS, layers)
    ram_bytes = build.PYTHON_BYTES + layers * units * UNIT_RECORD_BYTES + replayed
    return StageNeeds(
        stage="place",
        ram_bytes=ram_bytes,
        disk_bytes=layers * units,
        runtime_s=build.PYTHON_S + UNIT_S * layers * units,
    )


def counts_of(spec: ModelSpec, activations: Activations, sparsity: Sparsity, num_tokens: int) -> Counts:
    """Counts over the first `num_tokens` tokens. Every token uses all units of a family with density 1.

    Raises:
        ColdpressError: if another family was not counted.
    """
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


def _arrays(pairs: list[tuple[Group, Choice]]) -> dict[str, np.ndarray]:
    places = {f"{group.layer}.{group.family}": (~is_pinned(group, choice)).astype(np.int8) for group, choice in pairs}
    return places | {f"rank.{group.layer}.{group.family}": rank_of(group, choice) for group, choice in pairs}


def _choices(problem: Problem, whole: bool, ahead: bool) -> tuple[Sequence[Choice], float]:
    """Returns what is pinned of each group, and the proven gap; `ahead`: the next layer's units are read ahead."""
    if whole:
        return evenly(problem) if ahead else whole_layers(problem), 0.0
    solution = search(problem, PLACE_GAP)
    return solution.choices, solution.gap


def _problem(
    config: PlaceConfig, spec: ModelSpec, counts: Counts, sparsity: Sparsity, device: DeviceProfile, share: float
) -> Problem:
    """Builds the problem of pinning in `share` of the units' DRAM."""
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
        seconds = whole_layers_seconds(problem, whole_layers(problem), sparsity, device, traces)
        LOG.info("place: whole layers pinned: %.4g s of flash a token", seconds)
        if seconds < next(entry.flash_s_per_token for entry in tried if entry.share == share):
            return 1.0, True, tuple(tried)
    return share, False, tuple(tried)


def _reads_ahead(model: Model, sparsity: Sparsity, device: DeviceProfile) -> bool:
    """Tells whether a run in which every token uses every unit reads the next layer's ahead."""
    free_bytes = sparsity.budget.buffer_bytes + sparsity.budget.cache_bytes
    return buffers_of(model, sparsity, free_bytes, device).preload > 0


def _experts_are_whole(spec: ModelSpec, sparsity: Sparsity) -> bool:
    shares = ((used_share(found.family, spec), found.per_layer) for found in sparsity.densities)
    return spec.is_mixture and all(density == used for used, per_layer in shares for density in per_layer)


def _layer_placement(group: Group, choice: Choice) -> LayerPlacement:
    pinned = units_of(group, choice)
    return LayerPlacement(layer=group.layer, family=group.family, num_pinned=pinned, min_pinned=group.min_units)
