"""Decides which units are pinned in DRAM: PowerInfer's integer program with all its constraints (6, Eqs. 1-8).

Reads activation counts, the DRAM that `allocate` left for units, and the device's bandwidths; returns the tier of every
unit. On a phone the fast tier is DRAM, the slow one flash, and one synchronization is one flash round trip: pinning
fewer units of a layer than a round trip is worth in reads does not pay (Eq. 4). With `fast_tier=accelerator` it is the
paper's own split of a model in host DRAM; this release's runtime has no accelerator, so no artifact is built from that.
"""

import logging
import math
from typing import Literal

import numpy as np
from pydantic import Field

from compiler._io import Workspace, load_arrays
from compiler.cost_model import unit_bytes
from compiler.place._problem import (
    Choice,
    Group,
    Problem,
    bytes_of,
    make_group,
    pinned_units,
    relax,
    shrink,
    to_choices,
    to_program,
    value_of,
)
from runtime._plugins import load
from schemas.activations import Activations
from schemas.base import PositiveCount, Record, Share
from schemas.device import Accelerator, DeviceProfile
from schemas.errors import ColdpressError, DoesNotFitError
from schemas.families import FamilyName, families_of, num_units
from schemas.model import Model, ModelSpec
from schemas.placement import LayerPlacement, Placement, Tier
from schemas.sparsity import Sparsity

LOG = logging.getLogger(__name__)
MAX_BATCH_UNITS = 64
SINGLE_UNIT_ITEMS = 16384
"""Models with no more units than this are solved unit by unit; batches only serve the solver's time (6.3.3)."""


class PlaceConfig(Record):
    """Settings of `place`."""

    solver: str = Field(default="pulp_highs", description="a file of compiler/place: pulp_highs or cp_sat")
    cache: str = Field(default="lru", description="cache policy that will manage the DRAM not pinned; static has none")
    pinned_share: Share | None = Field(
        default=None,
        description="share of the units' DRAM that is pinned; without it 1 where the cache admits nothing, else 0.5",
    )
    batch_units: PositiveCount | None = Field(
        default=None,
        description="units of similar impact placed together; without it 64, or 1 for models of up to 16384 units",
    )
    gap: float = Field(default=1e-6, ge=0, lt=1, description="relative distance to the optimum at which solving ends")
    fast_tier: Literal["dram", "accelerator"] = Field(
        default="dram", description="tier to fill: dram over flash, or accelerator over dram"
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
        ColdpressError: if counts are missing, a name is unknown, or the fast tier is not the faster one.
        DoesNotFitError: if the two tiers together do not hold the model (accelerator only).
    """
    counts = _counts(model.spec, activations, sparsity)
    problem = _problem(config, model.spec, counts, sparsity, device)
    choices, gap = _solve(config, problem)
    tiers: tuple[Tier, Tier] = ("dram", "flash") if config.fast_tier == "dram" else ("accelerator", "dram")
    pinned = sum(bytes_of(group, choice) for group, choice in zip(problem.groups, choices, strict=True))
    impact = sum(value_of(group, choice) for group, choice in zip(problem.groups, choices, strict=True))
    total = sum(int(values.sum()) for values in counts.values())
    LOG.info(
        "place: %s of %s bytes pinned in %s, %.1f %% of all activations",
        f"{pinned:,}",
        f"{problem.fast_bytes:,}",
        tiers[0],
        100 * impact / max(1, total),
    )
    return Placement(
        solver=config.solver,
        tiers=tiers,
        layers=tuple(map(_layer_placement, problem.groups, choices)),
        arrays=work.once("placement", lambda: _arrays(problem.groups, choices)),
        objective=impact / activations.num_tokens,
        gap=gap,
        pinned_bytes=pinned,
    )


def _counts(spec: ModelSpec, activations: Activations, sparsity: Sparsity) -> dict[tuple[int, FamilyName], np.ndarray]:
    """Activation counts int64 [num_units] per layer and family; a family that is always used counts every token."""
    found: dict[tuple[int, FamilyName], np.ndarray] = {}
    for entry in activations.layers:
        for family in families_of(sparsity.method, spec):
            size = num_units(family, spec)
            if sparsity.density(family, entry.layer) >= 1:
                found[entry.layer, family] = np.full(size, activations.num_tokens, np.int64)
                continue
            statistics = next((known for known in entry.families if known.family == family), None)
            if statistics is None or statistics.density is None:
                raise ColdpressError(
                    f"layer {entry.layer}: no activation counts of family {family}; "
                    "run recalibrate at the densities that allocate chose"
                )
            found[entry.layer, family] = load_arrays(statistics.arrays, "counts")["counts"].astype(np.int64)
    return found


def _problem(
    config: PlaceConfig,
    spec: ModelSpec,
    counts: dict[tuple[int, FamilyName], np.ndarray],
    sparsity: Sparsity,
    device: DeviceProfile,
) -> Problem:
    batch_units = config.batch_units or (
        1 if sum(values.size for values in counts.values()) <= SINGLE_UNIT_ITEMS else MAX_BATCH_UNITS
    )
    accelerator = _accelerator(device) if config.fast_tier == "accelerator" else None
    groups: list[Group] = []
    for (layer, family), values in sorted(counts.items()):
        size = unit_bytes(family, spec, sparsity.format)
        least = min_pinned(size, device, accelerator)
        groups.append(make_group(layer, family, values, size, least, batch_units))
    if accelerator is None:
        return Problem(tuple(groups), math.floor(_pinned_share(config) * sparsity.budget.cache_bytes))
    problem = Problem(tuple(groups), accelerator.memory_bytes.value, sparsity.budget.cache_bytes)
    if problem.least_fast_bytes > problem.fast_bytes:
        raise DoesNotFitError(
            f"{problem.least_fast_bytes:,} bytes of units must lie on the accelerator, which has "
            f"{problem.fast_bytes:,}; raise dram_budget"
        )
    return problem


def _pinned_share(config: PlaceConfig) -> float:
    """What no cache policy may use has to be pinned; otherwise pinned units and cache slots get half each."""
    admits = load("runtime.cache", config.cache).Cache.admits
    if config.pinned_share is not None:
        return config.pinned_share
    return 0.5 if admits else 1.0


def _accelerator(device: DeviceProfile) -> Accelerator:
    if device.accelerator is None:
        raise ColdpressError(f"device {device.name} has no accelerator; use fast_tier=dram")
    return device.accelerator


def min_pinned(size_bytes: int, device: DeviceProfile, accelerator: Accelerator | None) -> int:
    """C_l: the least C with C T_fast + T_sync <= C T_slow (Eq. 4), T = bytes of a unit / bandwidth of its tier (Eq. 5).

    Flash reads a unit with one read of whole pages, at the device's rate for many reads in flight; its T_sync is one
    read's latency.

    Raises:
        ColdpressError: if the fast tier is not faster.
    """
    dram_s = size_bytes / device.dram_bytes_per_s.value
    if accelerator is None:
        flash, page = device.flash, device.flash.page_bytes.value
        slow_s = max(1 / flash.iops, -(-size_bytes // page) * page / flash.bytes_per_s)
        fast_s, sync_s = dram_s, flash.latency_s.value
    else:
        fast_s, slow_s, sync_s = size_bytes / accelerator.bytes_per_s.value, dram_s, accelerator.sync_s.value
    if fast_s >= slow_s:
        raise ColdpressError(
            f"device {device.name}: a unit of {size_bytes} bytes takes {fast_s:.3g} s in the fast tier and "
            f"{slow_s:.3g} s in the slow one, expected less; correct the profile's bandwidths"
        )
    return math.ceil(sync_s / (slow_s - fast_s))


def _solve(config: PlaceConfig, problem: Problem) -> tuple[tuple[Choice, ...], float]:
    """The choices and their proven relative distance to the optimum."""
    relaxation = relax(problem)
    spans = shrink(problem, relaxation)
    program = to_program(problem, spans)
    if not program.rows or not program.most_size:
        return tuple(Choice(0, remainder=False) for _ in problem.groups), 0.0
    answer = load("compiler.place", config.solver).solve(program, config.gap)
    choices = to_choices(problem, spans, answer)
    value = sum(value_of(group, choice) for group, choice in zip(problem.groups, choices, strict=True))
    # Impacts are integers, so a bound less than 1 above the value proves it; the margin covers the solver's floats.
    bound = math.floor(min(answer.bound, relaxation.bound) + 1e-6 * max(1.0, abs(answer.bound)) ** 0.5)
    return choices, max(0.0, (bound - value) / bound) if bound > 0 else 0.0


def _layer_placement(group: Group, choice: Choice) -> LayerPlacement:
    num_pinned = pinned_units(group, choice).size
    return LayerPlacement(layer=group.layer, family=group.family, num_pinned=num_pinned, min_pinned=group.min_units)


def _arrays(groups: tuple[Group, ...], choices: tuple[Choice, ...]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for group, choice in zip(groups, choices, strict=True):
        tier = np.ones(group.units.size, np.int8)
        tier[pinned_units(group, choice)] = 0
        arrays[f"{group.layer}.{group.family}"] = tier
    return arrays
