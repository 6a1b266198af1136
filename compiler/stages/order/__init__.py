"""Decides the order of every family's units on flash, layer by layer, from co-activation (Ripple 4).

A family that is always used whole gains nothing and keeps the model's order. In a mixture, experts stay together:
experts that are used whole are ordered as such; else the units of each expert are ordered, one expert after another,
and only units of one expert are paired. Layers that lie together on flash (`sparsity.layers_per_group`, ActiveFlow 3)
share one permutation: their activity is counted together, and the cost of an order is the sum over the layers.

A heuristic is a file of this package whose class `Plugin` extends `Heuristic` (_task.py).
"""

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.packed_bits import adjacent_share, counted
from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages.order import structural
from coldpress.compiler.stages.order._task import Activity, Arranged, Demand, Heuristic, OrderTask
from coldpress.runtime.dram.budget import Claim, cache_slots
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization._mixed import format_at
from coldpress.schemas.activations import Activations, FamilyStatistics
from coldpress.schemas.base import PositiveCount, Record
from coldpress.schemas.config import Key
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FamilyName, num_experts, num_units, unit_keys, used_share
from coldpress.schemas.model import Model
from coldpress.schemas.order import FamilyOrder, GapCost, Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
SORTED_PAIRS_BYTES = 256 << 20
"""Bytes of one run of sorted pairs (compiler/stages/order/ripple.py)."""


class OrderConfig(Record):
    """Settings of `order`."""

    order: Annotated[str, Key(plugins="coldpress.compiler.stages.order")] = Field(
        default="auto",
        description="how units are ordered on flash; auto: the best on held-out tokens, Algorithm 1 of Ripple unless "
        "another is clearly better",
    )
    search_tokens: Annotated[PositiveCount, Key()] = Field(
        default=4096,
        description="last calibration tokens, whose cache misses are counted; other counts are of all; fewer for a "
        "quick build",
    )


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
    """Orders the families of `layers` on `threads` threads; each holds the arrays of one group of layers at a time.

    Raises:
        UnknownNameError: if there is no such heuristic.
        ColdpressError: if a partly used family has no activation bits, or `layers` cut a group.
    """
    heuristic = load("coldpress.compiler.stages.order", Heuristic, config.order)
    sparsity = sparsity.smallest
    inputs = OrderInputs(config, model, activations, sparsity, placement, device)
    groups = groups_of(sparsity, model, layers)
    having = set(unit_keys(sparsity.families, model.spec))
    wanted: list[tuple[range, FamilyName]] = [
        (group, family) for group in groups for family in sparsity.families if (group[0], family) in having
    ]
    with ThreadPoolExecutor(threads) as pool:
        done = [pool.submit(_order_family, inputs, heuristic, group, family, work) for group, family in wanted]
        return Order(entries=tuple(entry.result() for entry in done))


def needs(build: "Build") -> StageNeeds:
    """Counts the heuristic's squares of pair counts, one run of sorted pairs, and the bits of a family."""
    spec, families = build.model.spec, build.families
    whole = build.density_sources == {"whole"}  # then experts are ordered, not units
    counted = [(num_experts(family, spec), num_units(family, spec)) for family in families]
    paired = max(experts if whole and experts > 1 else units // experts for experts, units in counted)
    squares = load("coldpress.compiler.stages.order", Heuristic, build.settings["order"]["order"]).COUNT_SQUARES
    counts = (2 if build.num_tokens < 1 << 16 else 4) * paired**2 * squares
    bits = build.num_tokens * max(units for _, units in counted) // 4
    ram_bytes = build.PYTHON_BYTES + counts + SORTED_PAIRS_BYTES + bits
    disk_bytes = 4 * spec.num_hidden_layers * build.layer_units(families)
    return StageNeeds(stage="order", ram_bytes=ram_bytes, disk_bytes=disk_bytes)


def groups_of(sparsity: Sparsity, model: Model, layers: tuple[int, ...]) -> list[range]:
    """Returns the groups of `layers`, in the order of `layers`; raises ColdpressError if `layers` cut a group."""
    groups = [group for group in sparsity.groups(model.spec.num_hidden_layers) if set(group) & set(layers)]
    for group in groups:
        missing = sorted(set(group) - set(layers))
        if missing:
            raise ColdpressError(
                f"layers {group[0]} to {group[-1]} lie together on flash and share one order, this job has no layer "
                f"{missing[0]}; set layers_per_job to a multiple of layers_per_group={sparsity.layers_per_group}"
            )
    return sorted(groups, key=lambda group: min(map(layers.index, group)))


@dataclass(frozen=True)
class OrderInputs:
    config: OrderConfig
    model: Model
    activations: Activations
    sparsity: Sparsity
    placement: Placement
    device: DeviceProfile

    @cached_property
    def slots(self) -> dict[tuple[int, FamilyName], int]:
        entries = self.placement.layers
        claims = [
            Claim(
                density=self.sparsity.density(entry.family, entry.layer),
                num_units=num_units(entry.family, self.model.spec),
                unit_bytes=self.unit_bytes(entry.layer, entry.family),
                num_pinned=entry.num_pinned,
            )
            for entry in entries
        ]
        counts = cache_slots(self.sparsity.cache, claims, self.sparsity.budget.cache_bytes)
        return {(entry.layer, entry.family): count for entry, count in zip(entries, counts, strict=True)}

    def unit_bytes(self, layer: int, family: FamilyName) -> int:
        return unit_bytes(family, self.model.spec, format_at(self.sparsity.formats, layer, family))

    def pinned(self, group: range, family: FamilyName) -> np.ndarray:
        """Returns bool [num_layers, num_units]: the units that each layer of a group keeps in DRAM."""
        names = [f"{layer}.{family}" for layer in group]
        places = load_arrays(self.placement.arrays, *names)
        return np.stack([places[name] for name in names]) == 0

    def task(
        self, group: range, family: FamilyName, activity: Activity, size: int = 1, units: slice = slice(None)
    ) -> OrderTask:
        """Returns the task of one family of a group, or of `units` with their part of the cache's slots; `size`
        consecutive units count as one."""
        some = replace(activity, bits=np.ascontiguousarray(activity.bits[units][::size]))
        pinned = self.pinned(group, family)[:, units]
        parts = len(activity.bits) // pinned.shape[1] * size
        demand = Demand(
            activity=some,
            pinned=np.logical_and.reduce(pinned.reshape(len(pinned), -1, size), axis=2),
            cache=self.sparsity.cache,
            cache_slots=tuple(self.slots[layer, family] // parts for layer in group),
            cache_options=self.sparsity.cache_options,
            search_tokens=self.config.search_tokens,
        )
        return OrderTask(demand, size * self.unit_bytes(group[0], family), self.device.flash)

    def activity(self, group: range, family: FamilyName) -> Activity:
        """Returns the layers' bits side by side. If no layer has bits since all are used whole, one token uses all;
        raises ColdpressError if a partly used layer has none."""
        units = num_units(family, self.model.spec)
        found = [self._statistics(layer, family) for layer in group]
        has_bits = any(statistics and statistics.density is not None for statistics in found)
        num_tokens = self.activations.num_tokens if has_bits else 1
        bits = [_bits(statistics, units, num_tokens) for statistics in found]
        return Activity(
            bits=bits[0] if len(bits) == 1 else np.concatenate(bits, axis=1),
            num_tokens=num_tokens,
            num_layers=len(group),
        )

    def _statistics(self, layer: int, family: FamilyName) -> FamilyStatistics | None:
        if self.sparsity.density(family, layer) < 1:
            return counted(self.activations, layer, family)
        return self.activations.layers[layer].family(family)

    def is_whole(self, group: range, family: FamilyName) -> bool:
        return all(self.sparsity.density(family, layer) >= 1 for layer in group)

    def used_together(self, group: range, family: FamilyName) -> int:
        """Counts consecutive units that are used together: an expert's if only the router leaves units out, else 1."""
        share, experts = used_share(family, self.model.spec), num_experts(family, self.model.spec)
        whole = experts > 1 and all(self.sparsity.density(family, layer) == share for layer in group)
        return num_units(family, self.model.spec) // experts if whole else 1


def _bits(statistics: FamilyStatistics | None, num_units: int, num_tokens: int) -> np.ndarray:
    if statistics is not None and statistics.density is not None:
        return load_arrays(statistics.arrays, "bits")["bits"]
    whole = np.packbits(np.ones(num_tokens, bool), bitorder="little")
    return np.repeat(whole[None], num_units, axis=0)


def _order_family(
    inputs: OrderInputs, heuristic: Heuristic, group: range, family: FamilyName, work: Workspace
) -> FamilyOrder:
    name, chosen = f"{group[0]}.{family}", heuristic
    if inputs.is_whole(group, family):
        chosen = structural.Plugin()
        LOG.info("order: %s %s is always used whole and keeps the model's order", _where(group), family)
    entry = work.record(name, FamilyOrder, lambda: _arrange(inputs, chosen, group, family, work))
    LOG.info(
        "order: %s %s by %s, %.1f %% of activations beside another, %.3g ms of flash per token",
        _where(group),
        family,
        entry.heuristic,
        100 * entry.adjacent_coactivation,
        1e3 * entry.flash_s_per_token,
    )
    return entry


def _arrange(
    inputs: OrderInputs, heuristic: Heuristic, group: range, family: FamilyName, work: Workspace
) -> FamilyOrder:
    activity = inputs.activity(group, family)
    size = inputs.used_together(group, family)
    of_units = inputs.task(group, family, activity)
    if size > 1:
        arranged = heuristic.arrange(inputs.task(group, family, activity, size))
    elif num_experts(family, inputs.model.spec) > 1:
        arranged = _by_expert(inputs, heuristic, group, family, activity)
    else:
        arranged = heuristic.arrange(of_units)
    # Experts stay whole. There are far fewer of them than units, so the heuristic's pair counts shrink as much.
    order = (arranged.order[:, None] * size + np.arange(size)).reshape(-1).astype(np.int32)
    costs = of_units.judge_gaps(order)
    return FamilyOrder(
        layer=group[0],
        num_layers=len(group),
        family=family,
        heuristic=arranged.heuristic,
        arrays=work.save(f"{group[0]}.{family}", {"order": order}),
        adjacent_coactivation=adjacent_share(activity.bits[order]),
        gap_costs=tuple(GapCost(gap_bytes=cost.gap_bytes, flash_s_per_token=cost.seconds) for cost in costs),
    )


def _by_expert(
    inputs: OrderInputs, heuristic: Heuristic, group: range, family: FamilyName, activity: Activity
) -> Arranged:
    """Orders one expert after another, to count one's pairs at a time; names the heuristic of most experts."""
    count = num_experts(family, inputs.model.spec)
    width = len(activity.bits) // count
    orders: list[np.ndarray] = []
    names: Counter[str] = Counter()
    for start in range(0, count * width, width):
        found = heuristic.arrange(inputs.task(group, family, activity, units=slice(start, start + width)))
        orders.append(start + found.order)
        names[found.heuristic] += 1
    return Arranged(np.concatenate(orders), max(sorted(names), key=lambda name: names[name]))


def _where(group: range) -> str:
    return f"layer {group[0]}" if len(group) == 1 else f"layers {group[0]} to {group[-1]}"
