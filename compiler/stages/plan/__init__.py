"""plan: settles cache, collapse gap, pinned share, buffers, preloading and drafts; one plan per DRAM budget.

Settings are judged by the seconds of held-out tokens on the simulated device (compiler/stages/plan/_search.py); a
user's setting is kept. All plans share one image, and the rank by which units deserve DRAM.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coldpress.compiler.candidates import AUTO, caches_for
from coldpress.compiler.draft_passes import MODEL
from coldpress.compiler.io import load_arrays
from coldpress.compiler.sections import bookkeeping_bytes
from coldpress.compiler.stages.plan import drafting, preloading
from coldpress.compiler.stages.plan._search import Found, PlanConfig, PlanInputs, gap_costs, replays, search
from coldpress.compiler.stages.plan._slot_shares import Division, SlotSettings, fixed_bytes, pinned_units, with_pins
from coldpress.runtime.drafts import NO_DRAFT
from coldpress.runtime.dram import experts
from coldpress.runtime.dram.budget import holds_everything
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.runtime.store.preload_room import NOTHING, USUAL_GUESS, Preloading
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.device import DeviceProfile, Flash
from coldpress.schemas.drafter import Drafter
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import Layout, Plan
from coldpress.schemas.model import Model
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.plans import PlanChoice, Plans
from coldpress.schemas.predictors import Predictors
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
EQUAL_SHARE = 0.005
"""A collapse gap counts as one of the best if its flash time exceeds the least by at most this share."""


def run(
    config: PlanConfig,
    model: Model,
    sparsity: Sparsity,
    placement: Placement,
    layout: Layout,
    order: tuple[Order, ...],
    device: DeviceProfile,
    predictors: Predictors | None,
    activations: Activations | None,
    corpus: Corpus,
    drafter: Drafter | None = None,
) -> Plans:
    """Returns one plan for each budget that `allocate` divided, the largest first.

    Raises:
        ColdpressError: if `preload` is on and nothing can be preloaded, if a draft is named and the selector cannot
            have one, or if the placement is of another model.
        DoesNotFitError: if resident tensors, predictors, KV cache, bookkeeping, read buffer and pinned units exceed a
            budget.
    """
    known = PlanInputs(model, sparsity.smallest, layout.sections, device, placement, order, activations)
    plans: list[Plan] = []
    choices: list[PlanChoice] = []
    for division in _divisions(config, known, sparsity.decisions, placement, predictors):
        plan, choice = _settled(config, division, known, order, corpus, drafter)
        plans.append(plan)
        choices.append(choice)
        for reason in choice.reasons:
            LOG.info("plan: %s: %s", plan.name, reason)
    return Plans(plans=tuple(plans), choices=tuple(choices), experts=activations and activations.experts)


def needs(build: "Build") -> StageNeeds:
    bits = build.layer_units(build.families) * build.num_tokens // 4
    return StageNeeds(stage="plan", ram_bytes=build.PYTHON_BYTES + 2 * build.BLOCK_BYTES + bits, disk_bytes=0)


def _divisions(
    config: PlanConfig,
    known: PlanInputs,
    decisions: Sequence[Sparsity],
    placement: Placement,
    predictors: Predictors | None,
) -> list[Division]:
    """Returns the budgets, the largest first; raises as `run`. `place` pins units for the smallest."""
    model, sections, device = known.model, known.sections, known.device
    caches = {*caches_for(config.cache), *(decision.cache for decision in decisions)}
    page_bytes = device.flash.page_bytes.value
    names = plan_names([decision.budget.dram_budget_bytes for decision in decisions])
    found: list[Division] = []
    for name, decision in zip(names, decisions, strict=True):
        fixed = fixed_bytes(model, decision, predictors, sections, device, caches, len(decisions))
        choice = decision.format, decision.method
        spared = {
            cache: fixed.bookkeeping - bookkeeping_bytes(model.spec, sections, *choice, {cache}, page_bytes)
            for cache in (() if decisions[1:] else caches)  # of several plans, the largest cache of all counts
        }
        found.append(Division(name, model, decision, sections, fixed, device, config.collapse, spared_bytes=spared))
    pinned, smallest = pinned_units(sections, placement), found[-1]
    found = [with_pins(division, smallest, pinned, config.pinned_share) for division in found]
    for division in reversed(found):
        division.check()
    return found


def _settled(
    config: PlanConfig,
    division: Division,
    known: PlanInputs,
    order: tuple[Order, ...],
    corpus: Corpus,
    drafter: Drafter | None,
) -> tuple[Plan, PlanChoice]:
    sparsity = division.sparsity
    start = SlotSettings(
        cache=sparsity.cache,
        cache_options=sparsity.cache_options,
        gap_bytes=collapse_gap_bytes(order, division.device.flash),
        read_buffer_bytes=division.buffers.read,
    )
    if (why_not := _why_not_searched(division.plan(start), division, known)) is not None:
        found = Found(start, reasons=[why_not])
    else:
        found = search(division, start, config, order, replays(known, sparsity))
    settings = replace(found.settings, preloading=_preloading(config, division, known, found.settings))
    plan = division.plan(settings)
    if settings.preloading.buffer_bytes:
        found.reasons.append(_in_words(settings.preloading, is_certain=division.buffers.preload > 0))
    if found.measured is not None and not found.measured.hit_rate:
        found.reasons.append(_no_hits(plan, division))
    elif (curve := known.activations and known.activations.experts) is not None:
        badly = experts.warning(curve, plan, known.model.spec, known.sections)
        found.reasons += [badly] if badly else []
    if plan.draft_bytes:
        assert drafter is not None
        plan, why = drafting.with_draft_model(known.setting(plan), drafter)
        found.reasons.append(why)
    elif config.draft == MODEL:
        found.reasons.append("no draft model: the whole model fits in DRAM, or a token leaves out units")
    elif config.draft not in (None, NO_DRAFT):
        plan, why = drafting.with_draft(
            config.draft, known.setting(plan), lambda: load_arrays(corpus.split("validation").arrays)["tokens"]
        )
        found.reasons.append(why)
    if (taken := next(iter(sparsity.tried), None)) is not None:
        density = sparsity.mlp_density(known.model.spec)
        found.reasons.insert(0, f"{sparsity.method} in {sparsity.format} at density {density:.2f}: {taken.reason}")
    return plan, PlanChoice(
        plan=division.name,
        default_token_s=found.default_s,
        token_s=found.measured and found.measured.token_s,
        hit_rate=found.measured and found.measured.hit_rate,
        tried=tuple(found.tried),
        reasons=tuple(found.reasons),
    )


def _in_words(chosen: Preloading, *, is_certain: bool) -> str:
    if is_certain:
        return (
            f"every layer has as many pinned units, and up to {chosen.buffer_bytes} bytes of the next layer's are "
            "preloaded while it computes"
        )
    return f"{chosen.buffer_bytes} bytes are preloaded, {chosen.guess:.0%} of a guess"


def _why_not_searched(plan: Plan, division: Division, known: PlanInputs) -> str | None:
    selector = load("coldpress.runtime.sparsity", Selector, plan.method)
    if holds_everything(plan, division.sections):
        return f"the whole model fits into {division.budget_bytes} bytes: no unit is read once it is loaded"
    if division.sparsity.is_whole:
        return "every token uses every unit: what fits is pinned, and no cache helps"
    if selector.SEES_RESIDENCY:
        return f"{plan.method} chooses by what is in DRAM, so that recorded tokens do not tell what it would choose"
    if known.activations is None or known.activations.num_tokens < 2:
        return "no activity was counted that settings could be compared on"
    return None


def _no_hits(plan: Plan, division: Division) -> str:
    used = sum(part.density * division.of_part[part.layer, part.family].num_units for part in plan.parts)
    held = sum(part.num_pinned + part.cache_slots for part in plan.parts)
    return (
        f"nothing is found in DRAM: it holds {held} units, fewer than the {used:.0f} of one token; a larger "
        "dram_budget or a lower density would let the cache work"
        if held < used
        else f"nothing is found in DRAM, though it holds {held} units, and a token uses {used:.0f}"
    )


def _preloading(config: PlanConfig, division: Division, known: PlanInputs, settings: SlotSettings) -> Preloading:
    """Returns the preload buffer, taken from DRAM that pinned units leave, and the share of a guess that is read."""
    if division.buffers.preload:  # every token uses every unit, so that nothing is guessed
        return Preloading(division.buffers.preload, 1.0)
    if config.preload == "off":
        return NOTHING
    run = preloading.PreloadInputs(
        known,
        division.sparsity,
        lambda tried: division.plan(replace(settings, preloading=tried)),
        division.unpinned_bytes(settings),
    )
    found, share = preloading.best(run)
    if config.preload == AUTO:
        return found if share < preloading.worth(run.sections) else NOTHING
    if not found.buffer_bytes:  # the quality of guesses is unknown: assume the usual share
        found = preloading.fitting(run, USUAL_GUESS)
    if not found.buffer_bytes:
        raise ColdpressError(
            f"preload=on was asked for, and {', '.join(run.sparsity.families)} in {len(run.sections)} sections, with "
            f"{run.free_bytes} bytes that no unit is pinned to, leave nothing to preload: expected neuron, mlp_in "
            "or attn_in of a section after the first and room for a page; leave preload=off"
        )
    return found


def collapse_gap_bytes(order: tuple[Order, ...], flash: Flash) -> int:
    """Returns the gap with the least modelled flash time over all sections; among near-ties, the nearest to break-even.

    Break-even would be optimal if a read took its share of IOPS and then its share of bandwidth. The device does both
    at once, so the best gap is where an order's reads and bytes take equally long: `order` tries several. It counts
    active units; predictors choose more, and for more units break-even is the safer side.
    """
    seconds = gap_costs(order)
    even = flash.break_even_gap_bytes
    limit = (1 + EQUAL_SHARE) * min(seconds.values(), default=0.0)
    equal = [gap for gap, found in seconds.items() if found <= limit]
    return min(equal, key=lambda gap: (abs(gap - even), gap), default=even)


DEFAULT = "default"
UNITS = ((10**9, "gb"), (10**6, "mb"), (10**3, "kb"), (1, "b"))
MAX_DIGITS = 9


def plan_names(budgets_bytes: Sequence[int]) -> list[str]:
    """Returns a name per DRAM budget: sizes such as `1.5gb`, with the digits that tell them apart."""
    if len(budgets_bytes) == 1:
        return [DEFAULT]
    names: list[str] = []
    for digits in range(1, MAX_DIGITS + 1):
        names = [_name(size, digits) for size in budgets_bytes]
        if len(set(names)) == len(names):
            break
    return names


def _name(size_bytes: int, digits: int) -> str:
    unit, word = next(unit for unit in UNITS if size_bytes >= unit[0])
    return f"{f'{size_bytes / unit:.{digits}f}'.rstrip('0').rstrip('.')}{word}"
