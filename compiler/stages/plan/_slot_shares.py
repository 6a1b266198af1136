"""Divides a plan's DRAM budget: fixed uses first, then pinned units, then cache slots.

The arithmetic of slots is the runtime's (runtime/dram/budget.py; DIP A). `place` pins units for the smallest budget; a
larger one pins more of the same rank.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from coldpress.compiler.activity.choice import selector_arrays
from coldpress.compiler.cost_model import kv_cache_bytes, predictor_bytes, resident_bytes
from coldpress.compiler.dense_run import Buffers, buffers_of, units_of_layer
from coldpress.compiler.sections import bookkeeping_bytes
from coldpress.runtime.dram.budget import Claim, cache_slots
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector, uses_read_units
from coldpress.runtime.store.facts import Key
from coldpress.runtime.store.preload_room import NOTHING, Preloading
from coldpress.schemas.base import Options
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import CacheName, Collapse, PartPlan, Plan, Section, SelectorArray
from coldpress.schemas.memory import Held
from coldpress.schemas.model import Model
from coldpress.schemas.placement import Placement
from coldpress.schemas.predictors import Predictors
from coldpress.schemas.sparsity import Sparsity


@dataclass(frozen=True)
class SlotSettings:
    cache: str
    gap_bytes: int
    read_buffer_bytes: int
    cache_options: Options = field(default_factory=Options)
    pinned_share: float | None = None
    """Share of the units' DRAM that is pinned, the same in all parts; None pins the units that `place` pins."""
    preloading: Preloading = NOTHING


def fixed_bytes(
    model: Model,
    sparsity: Sparsity,
    predictors: Predictors | None,
    sections: Sequence[Section],
    device: DeviceProfile,
    caches: Collection[CacheName],
    num_plans: int,
) -> Held:
    """Returns the DRAM of a run besides units and buffers, with the arrays of all plans and any of `caches`."""
    layers = predictors.layers if predictors else ()
    page_bytes = device.flash.page_bytes.value
    return Held(
        resident=resident_bytes(model, sparsity.families, sparsity.formats),
        predictors=sum(predictor_bytes(model.spec, entry.rank, entry.format) for entry in layers),
        kv_cache=kv_cache_bytes(model.spec, sparsity.context_length, sparsity.kv_cache),
        bookkeeping=bookkeeping_bytes(
            model.spec, sections, sparsity.format, sparsity.method, caches, page_bytes, num_plans
        ),
        draft=sparsity.budget.draft_bytes,
    )


@dataclass(frozen=True)
class Division:
    name: str
    model: Model
    sparsity: Sparsity
    sections: tuple[Section, ...]
    fixed: Held
    device: DeviceProfile
    collapse: Collapse
    pinned: Mapping[Key, int] = field(default_factory=dict[Key, int])
    """Units to pin, by layer, then family."""
    spared_bytes: Mapping[CacheName, int] = field(default_factory=dict[CacheName, int])
    """By cache policy, the bookkeeping that it saves against the largest policy, which `fixed` counts."""

    @property
    def budget_bytes(self) -> int:
        return self.sparsity.budget.dram_budget_bytes

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.fixed.num_bytes

    def free_bytes_with(self, cache: CacheName) -> int:
        return self.free_bytes + self.spared_bytes.get(cache, 0)

    @cached_property
    def buffers(self) -> Buffers:
        """The usual buffers; smaller ones where the units that the smallest budget pins leave less."""
        shape, left = (self.model, self.sparsity), self.free_bytes - self.pinned_bytes
        found = buffers_of(*shape, self.free_bytes, self.device)
        return found if sum(found) <= left else buffers_of(*shape, left, self.device)

    @property
    def pinned_bytes(self) -> int:
        return sum(count * self.of_part[key].unit_bytes for key, count in self.pinned.items())

    @property
    def room_bytes(self) -> int:
        return self.free_bytes - sum(self.buffers)

    @cached_property
    def of_part(self) -> dict[Key, Section]:
        """The section of each part, by layer, then in the order of families."""
        found = {(layer, section.family): section for section in self.sections for layer in section.layers}
        return dict(sorted(found.items(), key=lambda item: item[0][0]))

    def check(self) -> None:
        """Raises OverBudgetError, which names all uses of the budget, if pinned units do not fit."""
        if self.pinned_bytes > self.room_bytes:
            held = self.fixed._replace(buffers=sum(self.buffers))
            remedy = "use a shorter context_length or raise dram_budget"
            raise held.over(self.budget_bytes, remedy, pinned_bytes=self.pinned_bytes)

    def unpinned_bytes(self, settings: SlotSettings) -> int:
        """Returns the DRAM for units and for preloading, without pinned units and the read buffer."""
        held = sum(claim.num_pinned * claim.unit_bytes for claim in self._claims(settings))
        return self.free_bytes_with(settings.cache) - settings.read_buffer_bytes - held

    def plan(self, settings: SlotSettings) -> Plan:
        claims = self._claims(settings)
        reading_bytes = settings.read_buffer_bytes + settings.preloading.buffer_bytes
        slots = cache_slots(settings.cache, claims, self.free_bytes_with(settings.cache), reading_bytes)
        sparsity = self.sparsity
        return Plan(
            name=self.name,
            method=sparsity.method,
            options=sparsity.options,
            arrays=self._arrays,
            cache=settings.cache,
            cache_options=settings.cache_options,
            dram_budget_bytes=self.budget_bytes,
            context_length=sparsity.context_length,
            resident_bytes=self.fixed.resident,
            predictor_bytes=self.fixed.predictors,
            kv_cache=sparsity.kv_cache,
            kv_cache_bytes=self.fixed.kv_cache,
            read_buffer_bytes=settings.read_buffer_bytes,
            preload_buffer_bytes=settings.preloading.buffer_bytes,
            preload_guess=settings.preloading.guess,
            collapse_gap_bytes=settings.gap_bytes,
            collapse="static" if uses_read_units(sparsity) else self.collapse,
            queue_depth=self.device.flash.queue_depth.value,
            draft_bytes=self.fixed.draft,
            parts=tuple(
                PartPlan(
                    layer=layer, family=family, density=claim.density, num_pinned=claim.num_pinned, cache_slots=count
                )
                for (layer, family), claim, count in zip(self.of_part, claims, slots, strict=True)
            ),
        )

    def _claims(self, settings: SlotSettings) -> list[Claim]:
        claims = [
            Claim(self.sparsity.density(family, layer), section.num_units, section.unit_bytes, 0)
            for (layer, family), section in self.of_part.items()
        ]
        if settings.pinned_share is None:
            pins = [self.pinned[key] for key in self.of_part]
        else:
            reading_bytes = settings.read_buffer_bytes + settings.preloading.buffer_bytes
            slots = cache_slots(settings.cache, claims, self.free_bytes_with(settings.cache), reading_bytes)
            pins = [int(settings.pinned_share * count) for count in slots]
        return [claim._replace(num_pinned=count) for claim, count in zip(claims, pins, strict=True)]

    @cached_property
    def _arrays(self) -> tuple[SelectorArray, ...]:
        kept = load("coldpress.runtime.sparsity", Selector, self.sparsity.method).KEPT
        return tuple(
            SelectorArray.model_validate(
                {"layer": layer, "family": family, "name": name, "dtype": array.dtype.name, "shape": array.shape}
            )
            for (layer, family), arrays in sorted(selector_arrays(self.sparsity).items())
            for name, array in sorted(arrays.items())
            if name in kept
        )


def pinned_units(sections: Sequence[Section], placement: Placement) -> dict[Key, int]:
    """Returns the units that `place` pins, by layer and family; raises ColdpressError if the placement is of another
    model or method."""
    pinned = {(entry.layer, entry.family): entry.num_pinned for entry in placement.layers}
    found: dict[Key, int] = {}
    for section in sections:
        for layer in section.layers:
            count = pinned.get((layer, section.family))
            if count is None or count > section.num_units:
                raise ColdpressError(
                    f"the placement pins {count} of {section.num_units} {section.family} units in layer {layer}; "
                    "it was made for another model or method: run place again"
                )
            found[layer, section.family] = count
    return found


def with_pins(
    division: Division, smallest: Division, pinned: Mapping[Key, int], pinned_share: float | None
) -> Division:
    """Returns the division with the units that it pins; the smallest budget pins `pinned`.

    Every part gets the same multiple of its pins, of the same rank, up to all of its units. Where every token uses
    every unit, layers are pinned whole, one after another, since a partly read layer still waits for a first byte; or
    all layers equally, where the next layer's units are preloaded (compiler/dense_run.py). `pinned_share` is the user's
    share of the units' DRAM, or None.
    """
    if division.budget_bytes == smallest.budget_bytes:
        return replace(division, pinned=pinned)
    room, least = max(0, division.room_bytes), max(1, smallest.room_bytes)
    found: dict[Key, int] = {}
    left = room if pinned_share is None else int(pinned_share * room)
    if division.buffers.preload:
        return replace(division, pinned=_in_every_layer(division.of_part, left))
    for key, section in division.of_part.items():
        whole = division.sparsity.is_whole
        found[key] = min(section.num_units, left // section.unit_bytes if whole else pinned[key] * room // least)
        left -= found[key] * section.unit_bytes
    return replace(division, pinned=found)


def _in_every_layer(of_part: Mapping[Key, Section], room_bytes: int) -> dict[Key, int]:
    """Divides the room evenly among parts with units of one size; returns how many units of each fit."""
    unit_bytes = next(iter(of_part.values())).unit_bytes
    shares = (units_of_layer(room_bytes // unit_bytes, part, len(of_part)) for part in range(len(of_part)))
    return {key: min(section.num_units, count) for (key, section), count in zip(of_part.items(), shares, strict=True)}
