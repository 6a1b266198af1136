"""Decides the order of every family's units on flash, layer by layer, from what is active together (Ripple 4).

Reads packed activation bits, and which units `place` pinned; returns a permutation per layer and family with the share
of activations that find their flash neighbour active too. A family that is always used whole has nothing to gain from
an order and keeps the model's.
"""

import logging
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from compiler._io import Workspace, load_arrays
from compiler.cost_model import unit_bytes
from compiler.order._coactivation import adjacent_share
from compiler.order._problem import Problem
from runtime._plugins import load
from schemas.activations import Activations, FamilyStatistics
from schemas.base import Record
from schemas.device import DeviceProfile
from schemas.errors import ColdpressError
from schemas.families import FamilyName
from schemas.model import Model
from schemas.order import FamilyOrder, Order
from schemas.placement import Placement
from schemas.sparsity import Sparsity

LOG = logging.getLogger(__name__)
WHOLE_FAMILY_HEURISTIC = "structural"


class OrderConfig(Record):
    """Settings of `order`."""

    heuristic: str = Field(
        default="ripple", description="a file of compiler/order: ripple, collapse, frequency or structural"
    )
    seed: int = Field(default=0, ge=0, description="seed of heuristics that draw; each layer derives its own")


def run(
    config: OrderConfig,
    model: Model,
    activations: Activations,
    sparsity: Sparsity,
    placement: Placement,
    device: DeviceProfile,
    layers: tuple[int, ...],
    work: Workspace,
) -> Order:
    """Orders the families of `layers`.

    Raises:
        UnknownNameError: if there is no such heuristic.
        ColdpressError: if a family that is used in part has no activation bits.
    """
    load("compiler.order", config.heuristic)
    inputs = _Inputs(model, activations, sparsity, placement, device)
    return Order(
        entries=tuple(
            _order_family(config, inputs, layer, densities.family, work)
            for layer in layers
            for densities in sparsity.densities
        )
    )


@dataclass(frozen=True)
class _Inputs:
    model: Model
    activations: Activations
    sparsity: Sparsity
    placement: Placement
    device: DeviceProfile

    def problem(self, layer: int, family: FamilyName, bits: np.ndarray, num_tokens: int, seed: int) -> Problem:
        """What a heuristic gets to know of one family of one layer."""
        flash, name = self.device.flash, f"{layer}.{family}"
        size = unit_bytes(family, self.model.spec, self.sparsity.format)
        tiers = load_arrays(self.placement.arrays, name)[name]
        pinned = tiers != self.placement.tiers.index("flash")
        return Problem(bits, num_tokens, pinned, size * flash.iops / flash.bytes_per_s, seed + layer)


def _order_family(config: OrderConfig, inputs: _Inputs, layer: int, family: FamilyName, work: Workspace) -> FamilyOrder:
    statistics = _statistics(inputs.activations, layer, family)
    whole = inputs.sparsity.density(family, layer) >= 1
    if statistics is None or (statistics.density is None and not whole):
        raise ColdpressError(
            f"layer {layer}: no activation bits of family {family}; "
            "run recalibrate at the densities that allocate chose"
        )
    if whole:
        LOG.info("order: layer %d %s is always used whole and keeps the model's order", layer, family)
    heuristic = WHOLE_FAMILY_HEURISTIC if whole else config.heuristic
    if statistics.density is None:
        bits, num_tokens = np.full((statistics.num_units, 1), 1, np.uint8), 1  # every unit, on one token
    else:
        bits, num_tokens = load_arrays(statistics.arrays, "bits")["bits"], inputs.activations.num_tokens
    problem = inputs.problem(layer, family, bits, num_tokens, config.seed)
    plugin = load("compiler.order", heuristic)
    arrays = work.once(f"{layer}.{family}", lambda: {"order": plugin.arrange(problem)})
    adjacent = adjacent_share(bits, load_arrays(arrays, "order")["order"])
    LOG.info("order: layer %d %s, %.1f %% of activations beside another", layer, family, 100 * adjacent)
    return FamilyOrder(layer=layer, family=family, heuristic=heuristic, arrays=arrays, adjacent_coactivation=adjacent)


def _statistics(activations: Activations, layer: int, family: FamilyName) -> FamilyStatistics | None:
    found = next((entry for entry in activations.layers if entry.layer == layer), None)
    return next((known for known in found.families if known.family == family), None) if found else None
