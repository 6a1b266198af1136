"""Chooses what a session runs with: the plan, the device, and the reader of the flash image."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from coldpress.runtime import plugins
from coldpress.runtime.artifact import contents
from coldpress.runtime.artifact.reader import Artifact, open_artifact
from coldpress.runtime.cache import read_choice
from coldpress.runtime.decoder.selection import check_selector
from coldpress.runtime.drafts import NO_DRAFT, Draft
from coldpress.runtime.dram import budget
from coldpress.runtime.dram.kv_cache import KV_CACHE_FORMATS, kv_cache_bytes
from coldpress.runtime.flash import Flash, simulated
from coldpress.runtime.quantities import parse_bytes
from coldpress.runtime.routing import EXACT
from coldpress.runtime.routing import read_choice as read_routing
from coldpress.runtime.sparsity import Selector, sees_others, uses_read_units
from coldpress.runtime.store.preload_room import wanted
from coldpress.schemas.errors import ColdpressError, known_name
from coldpress.schemas.layout import Collapse, KvCacheFormat, Plan, Preload
from coldpress.schemas.manifest import Manifest

DEFAULT_FLASH = "direct"
"""The file of runtime/flash that flash.img is read with."""
SIMULATED = "simulated"
"""The file of runtime/flash that counts the device profile's seconds."""


def choose_plan(
    manifest: Manifest,
    dram_budget_bytes: int | None = None,
    selector: str | None = None,
    cache: str | None = None,
    collapse: Collapse | None = None,
    preload: Preload | None = None,
    kv_cache: KvCacheFormat | None = None,
    routing: str | None = None,
    among: Sequence[Plan] | None = None,
) -> Plan:
    """Chooses the plan to run with: the largest of `among` that fits, changed by each setting that is not None. `among`
    are some of the manifest's plans; None for all.

    Raises:
        DoesNotFitError: if the budget cannot hold what must stay in DRAM.
        ColdpressError: for an unknown name, a selector or a routing that the artifact cannot serve, if nothing can be
            preloaded, or for an adaptive gap where the gap decides which units a token uses.
    """
    if selector is not None:
        check_selector(selector, manifest)
    chosen = None if cache is None else read_choice(cache)
    offered = manifest.plans if among is None else tuple(among)
    fitting = tuple(plan for plan in offered if plan.method == selector)
    plans = tuple(_with_kv_cache(plan, manifest, kv_cache) for plan in fitting or offered)
    plan = budget.choose_plan(manifest, dram_budget_bytes, plans)
    listed = next(one for one in manifest.plans if one.name == plan.name)
    plan = plan.model_copy(update={"collapse": collapse or plan.collapse, **_routed(manifest, routing)})
    policy, options = chosen or (plan.cache, plan.cache_options)
    changes: dict[str, object] = {"cache": policy, "cache_options": options}
    if preload is not None:
        found = wanted(manifest, plan, preload)
        changes |= {"preload_buffer_bytes": found.buffer_bytes, "preload_guess": found.guess}
    if selector not in (None, plan.method):
        used = plugins.load("coldpress.runtime.sparsity", Selector, selector).NEEDS_PREDICTORS
        predictor_bytes = contents.layout_bytes(contents.predictor_tensors(manifest)) if used else 0
        changes |= {"method": selector, "options": {}, "predictor_bytes": predictor_bytes}
        changes |= {"draft": None, "draft_tokens": 0}  # what pays depends on the selector
    if collapse == "adaptive" and uses_read_units(plan.model_copy(update=changes)):
        raise ColdpressError(
            f"an adaptive gap was asked for, but the selector '{changes.get('method', plan.method)}' uses what its "
            "reads bring (use_read_units), so that the text would depend on measured seconds; leave --collapse out, or "
            "choose another selector"
        )
    # no setting changes what the budget is divided among: keep the plan's division exactly
    if plan.kv_cache == listed.kv_cache and all(getattr(plan, name) == value for name, value in changes.items()):
        return plan
    return budget.refit(manifest, plan.model_copy(update=changes), plan.dram_budget_bytes)


def asked_bytes(manifest: Manifest, asked: int | str) -> int:
    """Returns the bytes of a DRAM budget: of a number, of text such as `3GB`, or of a share such as `50%` of what the
    largest plan takes with everything in DRAM. Raises `ColdpressError` if it is no such amount."""
    share = re.fullmatch(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*", str(asked))
    if share is None:
        return parse_bytes(asked)
    if not 0 < float(share[1]) <= 100:
        raise ColdpressError(f"a DRAM budget is '{asked}', expected more than 0% and at most 100%")
    largest = max(manifest.plans, key=lambda plan: plan.dram_budget_bytes)
    return int(budget.whole_bytes(manifest, largest) * float(share[1]) / 100)


def budget_at(path: str | Path, asked: int | str | None) -> int | None:
    """Returns the bytes of a budget for the artifact at `path`; None stays None. Raises as `asked_bytes`."""
    if asked is None or not str(asked).rstrip().endswith("%"):
        return None if asked is None else parse_bytes(asked)
    return asked_bytes(open_artifact(path).manifest, asked)


def choices(
    manifest: Manifest,
    dram_budget_bytes: int | None,
    selector: str | None,
    cache: str | None,
    collapse: Collapse | None,
    preload: Preload | None,
    kv_cache: str | None,
    routing: str | None = None,
) -> tuple[Plan, Callable[[int], Plan]]:
    """Returns the plan to run with, and a function that chooses the plan for another budget during the run, among plans
    of the same selector, context, KV cache and draft model. Both raise as `choose_plan`."""
    kind = None if kv_cache is None else known_name("kv cache", kv_cache, KV_CACHE_FORMATS)
    settings = selector, cache, collapse, preload, kind, routing
    plan = choose_plan(manifest, dram_budget_bytes, *settings)
    kinds = {one.name: (one.method, one.context_length, one.kv_cache, one.draft_bytes) for one in manifest.plans}
    among = [one for one in manifest.plans if kinds[one.name] == kinds[plan.name]]
    return plan, lambda budget_bytes: choose_plan(manifest, budget_bytes, *settings, among)


def _routed(manifest: Manifest, text: str | None) -> dict[str, object]:
    """Returns the fields of a plan for another routing. Raises `ColdpressError` if the model has no experts."""
    if text is None:
        return {}
    if not manifest.model.is_mixture:
        raise ColdpressError(f"the routing '{text}' was asked for, but the model has no experts; leave it out")
    name, strength = read_routing(text)
    if name == EXACT:
        return {"routing": None, "routing_strengths": ()}
    strengths = (strength,) * manifest.model.num_hidden_layers
    return {"routing": name, "routing_strengths": strengths, **budget.WITHOUT_DRAFT}


def _with_kv_cache(plan: Plan, manifest: Manifest, kind: KvCacheFormat | None) -> Plan:
    if kind in (None, plan.kv_cache):
        return plan
    num_bytes = kv_cache_bytes(manifest.model, plan.context_length, kind)
    return plan.model_copy(update={"kv_cache": kind, "kv_cache_bytes": num_bytes})


def draft_of(plan: Plan, manifest: Manifest) -> tuple[Draft, int]:
    """Returns the draft of a plan, and how many tokens it proposes per pass; `off` where nothing is read from flash,
    since drafts save reads alone, and where another cache than the plan's lets a token change what the next one
    uses."""
    pays = not (budget.holds_everything(plan, manifest.flash.sections) or sees_others(plan))
    name = plan.draft if pays and plan.draft is not None else NO_DRAFT
    return plugins.load("coldpress.runtime.drafts", Draft, name), plan.draft_tokens


def make_flash(artifact: Artifact, plan: Plan, name: str) -> Flash:
    """Opens the reader of flash.img that runtime/flash has under `name`. Raises `UnknownNameError` if there is none,
    `ColdpressError` if this machine cannot read with it."""
    device = plugins.load_class("coldpress.runtime.flash", Flash, name)
    if not issubclass(device, simulated.Plugin):
        return device(artifact, plan.queue_depth)
    real: type[Flash] = plugins.load_class("coldpress.runtime.flash", Flash, DEFAULT_FLASH)
    return device(artifact, plan.queue_depth, data=real(artifact, plan.queue_depth))
