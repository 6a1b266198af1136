"""Decides the order of every family's units on flash, layer by layer, from what is active together (Ripple 4).

Reads packed activation bits, which units `place` pinned, and the device's flash; returns a permutation per layer and
family with the share of activations that find their flash neighbour active too, and the modelled flash time on the last
calibration tokens for each collapse gap, from which `layout` takes the plan's. A family that is always used whole has
nothing to gain and keeps the model's order.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import Field

from compiler._cache_slots import planned_slots, section_of
from compiler._io import Workspace, load_arrays
from compiler.activity.packed_bits import adjacent_share
from compiler.cost_model import unit_bytes
from compiler.order._task import Problem
from runtime._plugins import load
from schemas.activations import Activations, FamilyStatistics
from schemas.base import PositiveCount, Record
from schemas.device import DeviceProfile
from schemas.errors import ColdpressError
from schemas.families import FamilyName, num_units
from schemas.model import Model
from schemas.order import FamilyOrder, GapCost, Order
from schemas.placement import Placement
from schemas.sparsity import Sparsity

LOG = logging.getLogger(__name__)
WHOLE_FAMILY_HEURISTIC = "structural"


class OrderConfig(Record):
    """Settings of `order`."""

    heuristic: str = Field(
        default="auto", description="a file of compiler/order, such as auto, ripple, collapse or frequency"
    )
    cache: str = Field(default="lru", description="cache policy that will manage the DRAM not pinned")
    seed: int = Field(default=0, ge=0, description="seed of heuristics that draw; each layer derives its own")
    max_tokens: PositiveCount | None = Field(
        default=None, description="calibration tokens to use, evenly spread; without it all of them"
    )
    search_tokens: PositiveCount = Field(
        default=4096, description="tokens whose cache misses a search looks at, the last ones; other counts are of all"
    )
    counting: Literal["cpu", "gpu"] = Field(default="cpu", description="where co-activation is counted: cpu or gpu")


def run(
    config: OrderConfig,
    model: Model,
    activations: Activations,
    sparsity: Sparsity,
    placement: Placement,
    device: DeviceProfile,
    layers: tuple[int, ...],
    work: Workspace,
    threads: int = 1,
) -> Order:
    """Orders the families of `layers`, `threads` of them side by side; each needs two counts per pair of units.

    Raises:
        UnknownNameError: if there is no such heuristic or cache policy.
        ColdpressError: if a family that is used in part has no activation bits, or flash is no tier of the placement.
    """
    load("compiler.order", config.heuristic)
    load("runtime.cache", config.cache)
    if "flash" not in placement.tiers:
        raise ColdpressError(f"the placement has tiers {', '.join(placement.tiers)} and no flash to order units on")
    inputs = Inputs(config, model, activations, sparsity, placement, device)
    wanted: list[tuple[int, FamilyName]] = [
        (layer, densities.family) for layer in layers for densities in sparsity.densities
    ]
    with ThreadPoolExecutor(threads) as pool:
        done = [pool.submit(_order_family, inputs, layer, family, work) for layer, family in wanted]
        return Order(entries=tuple(entry.result() for entry in done))


@dataclass(frozen=True)
class Inputs:
    """The stage's settings and records."""

    config: OrderConfig
    model: Model
    activations: Activations
    sparsity: Sparsity
    placement: Placement
    device: DeviceProfile

    @cached_property
    def slots(self) -> dict[tuple[int, FamilyName], int]:
        """Units that the dynamic cache holds, per layer and family."""
        entries = self.placement.layers
        sections = tuple(
            section_of(
                entry.layer, entry.family, num_units(entry.family, self.model.spec), self.unit_bytes(entry.family)
            )
            for entry in entries
        )
        counts = planned_slots(self.config.cache, self.sparsity, sections, [entry.num_pinned for entry in entries])
        return {(entry.layer, entry.family): count for entry, count in zip(entries, counts, strict=True)}

    def unit_bytes(self, family: FamilyName) -> int:
        """Bytes of one unit."""
        return unit_bytes(family, self.model.spec, self.sparsity.format)

    def problem(self, layer: int, family: FamilyName, bits: np.ndarray, num_tokens: int) -> Problem:
        """What a heuristic gets to know of one family of one layer."""
        name = f"{layer}.{family}"
        tiers = load_arrays(self.placement.arrays, name)[name]
        bits, num_tokens = _thinned(bits, num_tokens, self.config.max_tokens or num_tokens)
        return Problem(
            bits=bits,
            num_tokens=num_tokens,
            pinned=tiers != self.placement.tiers.index("flash"),
            cache=self.config.cache,
            cache_slots=self.slots[layer, family],
            unit_bytes=self.unit_bytes(family),
            flash=self.device.flash,
            search_tokens=self.config.search_tokens,
            seed=self.config.seed + layer,
            gpu=self.config.counting == "gpu",
        )


def _thinned(bits: np.ndarray, num_tokens: int, max_tokens: int) -> tuple[np.ndarray, int]:
    """At most `max_tokens` tokens, in groups of eight that are evenly spread; all where there are no more."""
    if num_tokens <= max_tokens:
        return bits, num_tokens
    step = -(-num_tokens // max(8, max_tokens))
    kept = np.ascontiguousarray(bits[:, : num_tokens // 8 : step])
    return kept, 8 * kept.shape[1]


def _order_family(inputs: Inputs, layer: int, family: FamilyName, work: Workspace) -> FamilyOrder:
    statistics = _statistics(inputs.activations, layer, family)
    whole = inputs.sparsity.density(family, layer) >= 1
    if statistics is None or (statistics.density is None and not whole):
        raise ColdpressError(
            f"layer {layer}: no activation bits of family {family}; "
            "run recalibrate at the densities that allocate chose"
        )
    if whole:
        LOG.info("order: layer %d %s is always used whole and keeps the model's order", layer, family)
    if statistics.density is None:
        bits, num_tokens = np.full((statistics.num_units, 1), 1, np.uint8), 1  # every unit, on one token
    else:
        bits, num_tokens = load_arrays(statistics.arrays, "bits")["bits"], inputs.activations.num_tokens
    heuristic = WHOLE_FAMILY_HEURISTIC if whole else inputs.config.heuristic
    problem = inputs.problem(layer, family, bits, num_tokens)
    arrays = work.once(f"{layer}.{family}", lambda: _arrays(problem, heuristic))
    found = load_arrays(arrays)
    entry = FamilyOrder(
        layer=layer,
        family=family,
        heuristic=bytes(found["heuristic"]).decode(),
        arrays=arrays,
        adjacent_coactivation=adjacent_share(bits[found["order"]]),
        gap_costs=tuple(
            GapCost(gap_bytes=gap_bytes, flash_s_per_token=seconds)
            for gap_bytes, seconds in zip(found["gap_bytes"].tolist(), found["gap_flash_s"].tolist(), strict=True)
        ),
    )
    LOG.info(
        "order: layer %d %s by %s, %.1f %% of activations beside another, %.3g ms of flash per token",
        layer,
        family,
        entry.heuristic,
        100 * entry.adjacent_coactivation,
        1e3 * entry.flash_s_per_token,
    )
    return entry


def _arrays(problem: Problem, heuristic: str) -> dict[str, np.ndarray]:
    """What one family's file keeps: the order, whose it is, and what it costs (schemas/order.py)."""
    plugin = load("compiler.order", heuristic)
    chosen, order = plugin.choose(problem) if hasattr(plugin, "choose") else (heuristic, plugin.arrange(problem))
    judged = problem.judge_gaps(order)
    return {
        "order": order,
        "heuristic": np.frombuffer(chosen.encode(), np.uint8),
        "gap_bytes": np.array([cost.gap_bytes for cost in judged], np.int64),
        "gap_flash_s": np.array([cost.seconds for cost in judged]),
    }


def _statistics(activations: Activations, layer: int, family: FamilyName) -> FamilyStatistics | None:
    found = next((entry for entry in activations.layers if entry.layer == layer), None)
    return next((known for known in found.families if known.family == family), None) if found else None
