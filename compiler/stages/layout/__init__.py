"""layout: computes the offsets of flash.img (compiler/sections.py) and the runtime's plan; arithmetic only.

Reads the model's shape, the budget that `allocate` granted, how many units `place` pinned, what each collapse gap costs
under the orders that `order` found, what tokens use (compiler/stages/layout/preloading.py), and the device's page size.
The budget's remainder is cache (runtime/plan/budget.py, DIP A).
"""

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from coldpress.compiler.activity.choice import selector_arrays
from coldpress.compiler.cost_model import kv_cache_bytes, predictor_bytes, resident_bytes
from coldpress.compiler.dense_run import buffer_of
from coldpress.compiler.sections import bookkeeping_bytes, image_bytes, make_sections
from coldpress.compiler.stages.layout import preloading
from coldpress.runtime.plan.budget import Claim, cache_slots
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.runtime.store.ahead_room import NOTHING, USUAL_GUESS, Ahead
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import Record
from coldpress.schemas.config import Key
from coldpress.schemas.device import DeviceProfile, Flash
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.families import FamilyName
from coldpress.schemas.layout import Collapse, Layout, PartPlan, Plan, Section, SelectorArray
from coldpress.schemas.model import Model
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.predictors import Predictors
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

EQUAL_SHARE = 0.005
"""A collapse gap counts as one of the best if its flash time exceeds the least by at most this share."""


class LayoutConfig(Record):
    """Settings of `layout`."""

    collapse: Annotated[Collapse, Key()] = Field(
        default="static",
        description="whether reads are joined over the gap that is best for the device, or over one that the runtime "
        "finds while it runs, beginning there",
    )
    preload: Annotated[Literal["off", "on", "auto"], Key()] = Field(
        default="off",
        description="whether what later layers will probably use is read while earlier ones compute; auto: where the "
        "device's law and the measured likeness of layers say that it pays",
    )


def run(
    config: LayoutConfig,
    model: Model,
    sparsity: Sparsity,
    placement: Placement,
    order: tuple[Order, ...],
    device: DeviceProfile,
    predictors: Predictors | None,
    activations: Activations | None,
) -> Layout:
    """Computes all offsets, and one plan for the budget that `allocate` divided.

    Raises:
        ColdpressError: if `preload` is on and nothing can be read ahead.
        DoesNotFitError: if resident tensors, predictors, KV cache, bookkeeping, read buffer and pinned units exceed the
            budget.
    """
    page_bytes = device.flash.page_bytes.value
    sections = make_sections(model.spec, sparsity.families, sparsity.format, sparsity.layers_per_group)
    claims = _claims(sections, sparsity, placement)
    bookkeeping = bookkeeping_bytes(model.spec, sections, sparsity.method, sparsity.cache, page_bytes)
    fixed = _fixed_bytes(model, sparsity, predictors, bookkeeping)
    buffer_bytes = buffer_of(model, sparsity, sparsity.budget.dram_budget_bytes - sum(fixed), device)
    room_bytes = _room_bytes(sparsity.budget.dram_budget_bytes, fixed, buffer_bytes, claims)
    gap_bytes = collapse_gap_bytes(order, device.flash)
    free_bytes = room_bytes - sum(claim.num_pinned * claim.unit_bytes for claim in claims.values())

    def slots(ahead_bytes: int) -> list[int]:
        room = room_bytes + buffer_bytes
        return cache_slots(sparsity.cache, list(claims.values()), room, buffer_bytes + ahead_bytes)

    def plan(ahead: Ahead) -> Plan:
        return Plan(
            name="default",
            method=sparsity.method,
            options=sparsity.options,
            arrays=_selector_arrays(sparsity),
            cache=sparsity.cache,
            cache_options=sparsity.cache_options,
            dram_budget_bytes=sparsity.budget.dram_budget_bytes,
            context_length=sparsity.context_length,
            resident_bytes=fixed.resident,
            predictor_bytes=fixed.predictors,
            kv_cache=sparsity.kv_cache,
            kv_cache_bytes=fixed.kv_cache,
            read_buffer_bytes=buffer_bytes,
            preload_buffer_bytes=ahead.buffer_bytes,
            preload_guess=ahead.guess,
            collapse_gap_bytes=gap_bytes,
            collapse=config.collapse,
            queue_depth=device.flash.queue_depth.value,
            parts=_parts(claims, slots(ahead.buffer_bytes)),
        )

    judged = preloading.Run(model, sparsity, placement, sections, order, device, activations, cache(plan), free_bytes)
    found = plan(_ahead(config, judged))
    return Layout(page_bytes=page_bytes, sections=sections, flash_bytes=image_bytes(sections), plans=(found,))


Claims = dict[tuple[int, FamilyName], Claim]
"""Claims by layer, then family."""


def needs(build: "Build") -> StageNeeds:
    """Counts arithmetic, and the bits of a layer's units where reading ahead is judged."""
    bits = build.layer_units(build.families) * build.num_tokens // 4
    return StageNeeds(
        stage="layout", ram_bytes=build.PYTHON_BYTES + build.BLOCK_BYTES + bits, disk_bytes=0, runtime_s=3600
    )


def _claims(sections: tuple[Section, ...], sparsity: Sparsity, placement: Placement) -> Claims:
    pinned = {(entry.layer, entry.family): entry.num_pinned for entry in placement.layers}
    found: Claims = {}
    for section in sections:
        for layer in section.layers:
            count = pinned.get((layer, section.family))
            if count is None or count > section.num_units:
                raise ColdpressError(
                    f"the placement pins {count} of {section.num_units} {section.family} units in layer {layer}; "
                    "it was made for another model or method: run place again"
                )
            density = sparsity.density(section.family, layer)
            found[layer, section.family] = Claim(density, section.num_units, section.unit_bytes, count)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))  # families stay in their order


def _parts(claims: Claims, slots: list[int]) -> tuple[PartPlan, ...]:
    return tuple(
        PartPlan(layer=layer, family=family, density=claim.density, num_pinned=claim.num_pinned, cache_slots=num_slots)
        for ((layer, family), claim), num_slots in zip(claims.items(), slots, strict=True)
    )


def _ahead(config: LayoutConfig, run: preloading.Run) -> Ahead:
    """Returns the preload buffer, taken from DRAM that pinned units leave, and the share of a guess that is read."""
    if config.preload == "off":
        return NOTHING
    if config.preload == "auto":
        return preloading.chosen(run)
    found, _ = preloading.best(run)
    if not found.buffer_bytes:  # the quality of guesses is unknown: assume the usual share
        found = preloading.fitting(run, USUAL_GUESS)
    if not found.buffer_bytes:
        raise ColdpressError(
            f"preload=on was asked for, and {', '.join(run.sparsity.families)} in {len(run.sections)} sections, with "
            f"{run.free_bytes} bytes that no unit is pinned to, leave nothing to read ahead: expected neuron, mlp_in "
            "or attn_in of a section after the first and room for a page; leave preload=off"
        )
    return found


def collapse_gap_bytes(order: tuple[Order, ...], flash: Flash) -> int:
    """Returns the gap with the least modelled flash time over all sections; among near-ties, the nearest to break-even.

    Break-even would be optimal if a read took its share of IOPS and then its share of bandwidth. The device does both
    at once, so the best gap is where an order's reads and bytes take equally long: `order` tries several. It counts
    active units; predictors choose more, and for more units break-even is the safer side.
    """
    seconds: dict[int, float] = defaultdict(float)
    for entry in (entry for part in order for entry in part.entries):
        for cost in entry.gap_costs:
            seconds[cost.gap_bytes] += cost.flash_s_per_token
    even = flash.break_even_gap_bytes
    limit = (1 + EQUAL_SHARE) * min(seconds.values(), default=0.0)
    equal = [gap for gap, found in seconds.items() if found <= limit]
    return min(equal, key=lambda gap: (abs(gap - even), gap), default=even)


def _selector_arrays(sparsity: Sparsity) -> tuple[SelectorArray, ...]:
    """Lists the selector's arrays in the tables, by layer, family and name."""
    kept = load("coldpress.runtime.sparsity", Selector, sparsity.method).KEPT
    return tuple(
        SelectorArray.model_validate(
            {"layer": layer, "family": family, "name": name, "dtype": array.dtype.name, "shape": array.shape}
        )
        for (layer, family), arrays in sorted(selector_arrays(sparsity).items())
        for name, array in sorted(arrays.items())
        if name in kept
    )


class _Fixed(NamedTuple):
    """Bytes that do not depend on the cache."""

    resident: int
    predictors: int
    kv_cache: int
    bookkeeping: int


def _fixed_bytes(model: Model, sparsity: Sparsity, predictors: Predictors | None, bookkeeping: int) -> _Fixed:
    layers = predictors.layers if predictors else ()
    stored = [predictor_bytes(model.spec, entry.rank, entry.format) for entry in layers]
    return _Fixed(
        resident=resident_bytes(model, sparsity.families, sparsity.format),
        predictors=sum(stored),
        kv_cache=kv_cache_bytes(model.spec, sparsity.context_length, sparsity.kv_cache),
        bookkeeping=bookkeeping,
    )


def _room_bytes(budget_bytes: int, fixed: _Fixed, buffer_bytes: int, claims: Claims) -> int:
    """Returns the bytes that the budget leaves for pinned units and cache slots."""
    room_bytes = budget_bytes - sum(fixed) - buffer_bytes
    pinned_bytes = sum(claim.num_pinned * claim.unit_bytes for claim in claims.values())
    if pinned_bytes > room_bytes:
        raise DoesNotFitError(
            f"a DRAM budget of {budget_bytes} bytes was asked for, {budget_bytes - room_bytes + pinned_bytes} are "
            f"needed: {fixed.resident} resident, {fixed.predictors} predictors, {fixed.kv_cache} KV cache, "
            f"{fixed.bookkeeping} bookkeeping, {buffer_bytes} read buffer, {pinned_bytes} pinned units; raise "
            "dram_budget or shorten context_length"
        )
    return room_bytes
