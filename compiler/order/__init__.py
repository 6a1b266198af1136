"""Decides the order of every family's units on flash, layer by layer, from what is active together (Ripple 4).

Reads packed activation bits; returns a permutation per layer and family with the share of activations that find their
flash neighbour active too. A family that is always used whole has nothing to gain from an order and keeps the model's.
"""

import logging

import numpy as np
from pydantic import Field

from compiler._io import Workspace, load_arrays
from compiler.order._coactivation import adjacent_share
from runtime._plugins import load
from schemas.activations import Activations, FamilyStatistics
from schemas.base import Record
from schemas.errors import ColdpressError
from schemas.families import FamilyName
from schemas.order import FamilyOrder, Order
from schemas.sparsity import Sparsity

LOG = logging.getLogger(__name__)
WHOLE_FAMILY_HEURISTIC = "structural"


class OrderConfig(Record):
    """Settings of `order`."""

    heuristic: str = Field(default="ripple", description="a file of compiler/order: ripple, frequency or structural")


def run(
    config: OrderConfig, activations: Activations, sparsity: Sparsity, layers: tuple[int, ...], work: Workspace
) -> Order:
    """Orders the families of `layers`.

    Raises:
        UnknownNameError: if there is no such heuristic.
        ColdpressError: if a family that is used in part has no activation bits.
    """
    load("compiler.order", config.heuristic)
    return Order(
        entries=tuple(
            _order_family(config.heuristic, activations, sparsity, layer, densities.family, work)
            for layer in layers
            for densities in sparsity.densities
        )
    )


def _order_family(
    heuristic: str, activations: Activations, sparsity: Sparsity, layer: int, family: FamilyName, work: Workspace
) -> FamilyOrder:
    statistics = _statistics(activations, layer, family)
    whole = sparsity.density(family, layer) >= 1
    if statistics is None or (statistics.density is None and not whole):
        raise ColdpressError(
            f"layer {layer}: no activation bits of family {family}; "
            "run recalibrate at the densities that allocate chose"
        )
    if whole:
        LOG.info("order: layer %d %s is always used whole and keeps the model's order", layer, family)
        heuristic = WHOLE_FAMILY_HEURISTIC
    plugin = load("compiler.order", heuristic)
    if statistics.density is None:
        bits, num_tokens = np.full((statistics.num_units, 1), 1, np.uint8), 1  # every unit, on one token
    else:
        bits, num_tokens = load_arrays(statistics.arrays, "bits")["bits"], activations.num_tokens
    arrays = work.once(f"{layer}.{family}", lambda: {"order": plugin.arrange(bits, num_tokens)})
    adjacent = adjacent_share(bits, load_arrays(arrays, "order")["order"])
    LOG.info("order: layer %d %s, %.1f %% of activations beside another", layer, family, 100 * adjacent)
    return FamilyOrder(layer=layer, family=family, heuristic=heuristic, arrays=arrays, adjacent_coactivation=adjacent)


def _statistics(activations: Activations, layer: int, family: FamilyName) -> FamilyStatistics | None:
    found = next((entry for entry in activations.layers if entry.layer == layer), None)
    return next((known for known in found.families if known.family == family), None) if found else None
