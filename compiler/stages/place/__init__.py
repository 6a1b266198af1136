"""Decides which memory tier keeps each unit: PowerInfer's integer program with all its constraints (6, Eqs. 1-8).

Reads activation counts and bits, the DRAM that `allocate` left for units, and the device's bandwidths; returns the tier
of every unit. On a phone the fast tier is DRAM, the slow one flash, and one synchronization is one flash round trip:
pinning fewer units of a layer than a round trip is worth in reads does not pay (Eq. 4). How much of the DRAM is pinned
and how much is left to the dynamic cache is decided by replaying held-out tokens (_share). The paper's own split of a
model in host DRAM is `python -m coldpress.compiler place --tiers accelerator-dram`: for the study of the program, which
benchmarks/place.py measures, and no key of a build, since the runtime has no accelerator and `order` refuses a
placement without flash.
"""

import logging
import math
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.choice import REPLAYED_LAYERS
from coldpress.compiler.activity.held_out import MAX_WINDOWS, WARM_TOKENS, WINDOW_TOKENS, split_tokens, traces_of
from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.dense_run import buffers_of
from coldpress.compiler.io import Workspace
from coldpress.compiler.shared_settings import PinnedShareSetting
from coldpress.compiler.stages.place import _solve
from coldpress.compiler.stages.place._counts import Counts, all_counts, head_counts
from coldpress.compiler.stages.place._problem import (
    Choice,
    Group,
    Problem,
    bytes_of,
    impact_of,
    make_group,
    rank_of,
    tiers_of,
    units_of,
)
from coldpress.compiler.stages.place._program import Solver
from coldpress.compiler.stages.place._share import SHARES, choose_share, replay, whole_layers_seconds
from coldpress.compiler.stages.place._tiers import accelerator_of, min_units, tiers_named, worth
from coldpress.compiler.stages.place._whole import evenly, whole_layers
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.plugins import load, load_class
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import PositiveCount
from coldpress.schemas.config import Key
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.families import format_at, used_share
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.placement import LayerPlacement, PinnedShare, Placement, Tier
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
UNIT_S = 5e-5
"""Seconds per unit: 3 s for four layers of 14,336 (docs/experiments/builds.md)."""
UNIT_RECORD_BYTES = 128
"""Bytes per unit while units are placed: frequency, value, tier, and its share of the solver's rows."""
MAX_BATCH_UNITS = 64
SINGLE_UNIT_ITEMS = 16384
"""Models with at most this many units are solved unit by unit; batches only save solver time (6.3.3)."""
PLACE_GAP = 1e-5
"""Relative distance to the optimum at which placing ends."""
SHARE_GAP = 1e-3
"""Relative gap that is close enough to the optimum for comparing shares."""


class PlaceConfig(PinnedShareSetting):
    """Settings of `place`."""

    place: Annotated[str, Key(plugins="coldpress.compiler.stages.place")] = Field(
        default="pulp_highs", description="what solves the placement's integer program; another one to check the first"
    )
    batch_units: PositiveCount | None = Field(
        default=None, description="units of similar impact that are placed together"
    )
    tiers: str = Field(
        default="dram-flash",
        description="memory tiers, fastest first: dram-flash, accelerator-dram or accelerator-dram-flash",
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
        ColdpressError: if counts are missing, a name is unknown, or a tier is not faster than the next one.
        DoesNotFitError: if all tiers together do not hold the model (possible only without a flash tier).
    """
    tiers, sparsity = tiers_named(config.tiers), sparsity.smallest
    counts = all_counts(model.spec, activations, sparsity)
    share, whole, tried = _pinned_share(config, model.spec, activations, sparsity, device)
    problem = _problem(config, model.spec, counts, sparsity, device, share)
    solver = load("coldpress.compiler.stages.place", Solver, config.place)
    if whole:
        solution = evenly(problem) if _reads_ahead(model, sparsity, device) else whole_layers(problem)
    else:
        solution = _solve.search(problem, solver, PLACE_GAP)
    pairs = list(zip(problem.groups, solution.choices, strict=True))
    placement = Placement(
        solver=config.place,
        tiers=tiers,
        layers=tuple(_layer_placement(*pair) for pair in pairs),
        arrays=work.once("placement", lambda: _arrays(pairs)),
        objective=solution.value / problem.groups[0].worth[0] / activations.num_tokens,
        gap=solution.gap,
        pinned_bytes=sum(bytes_of(*pair) for pair in pairs),
        pinned_share=share,
        shares_tried=tried,
    )
    total = sum(int(values.sum()) for values in counts.values())
    LOG.info(
        "place: %s of %s bytes in %s, %.1f %% of all activations",
        f"{placement.pinned_bytes:,}",
        f"{sum(problem.fast_bytes):,}",
        " and ".join(tiers[:-1]),
        100 * sum(impact_of(*pair) for pair in pairs) / max(1, total),
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


def _arrays(pairs: list[tuple[Group, Choice]]) -> dict[str, np.ndarray]:
    tiers = {f"{group.layer}.{group.family}": tiers_of(group, choice) for group, choice in pairs}
    return tiers | {f"rank.{group.layer}.{group.family}": rank_of(group, choice) for group, choice in pairs}


def _problem(
    config: PlaceConfig,
    spec: ModelSpec,
    counts: Counts,
    sparsity: Sparsity,
    device: DeviceProfile,
    share: float | None,
) -> Problem:
    """Builds the problem whose DRAM tier is `share` of the units' DRAM; None where DRAM is the slowest tier."""
    tiers = tiers_named(config.tiers)
    num_units = sum(values.size for values in counts.values())
    batch_units = config.batch_units or (1 if num_units <= SINGLE_UNIT_ITEMS else MAX_BATCH_UNITS)
    groups: list[Group] = []
    for (layer, family), values in sorted(counts.items()):
        size = unit_bytes(family, spec, format_at(sparsity.formats, layer, family))
        least, weights = min_units(size, tiers, device), worth(size, tiers, device)
        groups.append(make_group(layer, family, values, size, least, batch_units, weights))
    room: dict[Tier, int] = {"dram": math.floor((1.0 if share is None else share) * sparsity.budget.cache_bytes)}
    if "accelerator" in tiers:
        room["accelerator"] = accelerator_of(device).memory_bytes.value
    problem = Problem(tuple(groups), tuple(room[tier] for tier in tiers[:-1]), room.get(tiers[-1]))
    if problem.least_fast_bytes > sum(problem.fast_bytes):
        raise DoesNotFitError(
            f"{problem.least_fast_bytes:,} bytes of units must lie on the {tiers[0]}, which has "
            f"{sum(problem.fast_bytes):,}; raise dram_budget"
        )
    return problem


def _pinned_share(
    config: PlaceConfig, spec: ModelSpec, activations: Activations, sparsity: Sparsity, device: DeviceProfile
) -> tuple[float | None, bool, tuple[PinnedShare, ...]]:
    """Returns the pinned share of the units' DRAM, whether whole layers are pinned, and all shares that were tried."""
    admits = load_class("coldpress.runtime.cache", CachePolicy, sparsity.cache).admits
    if tiers_named(config.tiers)[-1] != "flash":
        return None, False, ()  # nothing is read, so nothing is cached
    if config.pinned_share is not None:
        return config.pinned_share, sparsity.is_whole, ()
    if not admits or sparsity.is_whole:  # the policy caches nothing, or every token uses every unit: pin all that fits
        return 1.0, sparsity.is_whole, ()
    head, windows = split_tokens(activations.num_tokens)
    counts = head_counts(spec, activations, sparsity, head)
    traces = traces_of(spec, activations, sparsity, windows)
    solver = load("coldpress.compiler.stages.place", Solver, config.place)
    tried: list[PinnedShare] = []
    for share in SHARES:
        problem = _problem(config, spec, counts, sparsity, device, share)
        choices = _solve.search(problem, solver, SHARE_GAP).choices
        seconds = replay(problem, choices, sparsity, device, traces)
        tried.append(PinnedShare(share=share, flash_s_per_token=seconds))
        LOG.info("place: %3.0f %% of the units' DRAM pinned: %.4g s of flash a token", 100 * share, seconds)
    share = choose_share(tried)
    if _experts_are_whole(spec, sparsity):
        problem = _problem(config, spec, counts, sparsity, device, 1.0)
        seconds = whole_layers_seconds(problem, whole_layers(problem).choices, sparsity, device, traces)
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
    held = tuple(units_of(group, choice, tier) for tier in range(len(choice.counts)))
    return LayerPlacement(
        layer=group.layer,
        family=group.family,
        num_pinned=sum(held),
        min_pinned=group.min_units[0],
        tier_units=held,
        tier_min_units=group.min_units,
    )
