"""Lists the candidates of `method=auto`, for the stages before the choice (made by `allocate`) and for the rules.

Every selector that applies to the model is a candidate, and so are every format and every cache policy unless the user
names one: a new file of a plug-in package takes part without an edit. Selectors of exact zeros, and predictors, whose
training pays where zeros are exact, need such a model.
"""

from collections.abc import Sequence

from coldpress.runtime import plugins
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.drafts import Draft
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.quantization._planes import planes_of
from coldpress.runtime.routing import PACKAGE, Routing
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import Options
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import WHOLE_MLP, missing_for_decoder
from coldpress.schemas.model import ModelSpec

AUTO = "auto"
DENSE = "dense"
ATTENTION = ("attn_in", "attn_out")
"""The families of attention's matrices."""
DEFAULT_FORMAT, DEFAULT_PLANES = "int4_group32", "int4_2_2"
"""Formats of a build whose method is given and whose format is not; the second if its selector refines."""


def methods_for(method: str, exact_zeros: bool, is_mixture: bool) -> tuple[str, ...]:
    """Returns `method` alone, or the selectors that `auto` may take for such a model, dense first."""
    if method != AUTO:
        return (method,)
    names = plugins.names("coldpress.runtime.sparsity")
    found = {name: load("coldpress.runtime.sparsity", Selector, name) for name in names}
    fit = [
        name
        for name, selector in found.items()
        if (exact_zeros or not (selector.NEEDS_EXACT_ZEROS or selector.NEEDS_PREDICTORS))
        and not (is_mixture and selector.NEEDS_PREDICTORS)
    ]
    return tuple(sorted(fit, key=lambda name: (not found[name].is_whole, name)))


def candidates(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """Returns the methods that are compared for a model: those whose families its decoder can compute."""
    return tuple(name for name in methods_for(AUTO, spec.exact_zeros, spec.is_mixture) if _fits(name, options, spec))


def formats_for(named: str) -> tuple[str, ...]:
    """Returns the formats that a build may have: the one that the user named, or all."""
    return (named,) if named != AUTO else tuple(plugins.names("coldpress.runtime.quantization"))


def go_together(method: str, format_name: str, has_reason: bool) -> bool:
    """Returns whether a search compares a selector in a format: one that refines in planes, others in plain formats. A
    dense run reads as much in planes as in the plain format: it is compared in planes only where the user names them,
    or where it can draft with them (`has_reason`)."""
    selector, in_planes = load("coldpress.runtime.sparsity", Selector, method), planes_of(format_name) is not None
    return in_planes == selector.IN_PLANES or (selector.is_whole and has_reason)


def finer_of(format_name: str) -> str | None:
    """Returns the format in planes of the same plain format that has the next more bits in DRAM; None if there is
    none."""
    planes = planes_of(format_name)
    every = [planes_of(name) for name in plugins.names("coldpress.runtime.quantization")]
    finer = [one for one in every if one and planes and one.WHOLE == planes.WHOLE and one.HIGH_BITS > planes.HIGH_BITS]
    return min(finer, key=lambda one: (one.HIGH_BITS, one.name())).name() if finer else None


def check_format(method: str, format_name: str) -> None:
    """Refuses a format in planes for a selector that leaves units out, and one without for a selector that refines.

    Raises:
        ColdpressError: naming what goes together.
    """
    if AUTO in (method, format_name):
        return
    selector, planes = load("coldpress.runtime.sparsity", Selector, method), planes_of(format_name)
    if selector.IN_PLANES and planes is None:
        known = [name for name in plugins.names("coldpress.runtime.quantization") if planes_of(name)]
        raise ColdpressError(
            f"method={method} refines units in planes, and format={format_name} has none; use {' or '.join(known)}"
        )
    if planes is not None and not (selector.IN_PLANES or selector.is_whole):
        raise ColdpressError(
            f"method={method} leaves units out, and format={format_name} keeps a coarse plane of each in DRAM; use "
            f"method=refine, or format={planes.WHOLE}"
        )


def check_draft(draft: str | None, format_name: str) -> None:
    """Refuses a draft from coarse planes where the format has none.

    Raises:
        ColdpressError: naming both.
    """
    if draft in (None, AUTO) or format_name == AUTO or planes_of(format_name) is not None:
        return
    if load("coldpress.runtime.drafts", Draft, draft).NEEDS_PLANES:
        raise ColdpressError(
            f"draft={draft} was asked for, and format={format_name} has no coarse planes; use a format in planes, such "
            f"as {DEFAULT_PLANES}"
        )


def caches_for(named: str) -> tuple[str, ...]:
    """Returns the cache policies that a build may have: the one that the user named, or all that a run can follow."""
    if named != AUTO:
        return (named,)
    package = "coldpress.runtime.cache"
    found = plugins.names(package)
    return tuple(name for name in found if not plugins.load_class(package, CachePolicy, name).looks_ahead)


def routings_for(named: str, is_mixture: bool) -> tuple[str, ...]:
    """Returns the ways of routing that a search may take besides the model's own: the one that the user named, or with
    `auto` all; none for a model without experts."""
    names = plugins.names(PACKAGE) if named == AUTO else (named,)
    return tuple(name for name in names if is_mixture and load(PACKAGE, Routing, name).SEES_RESIDENCY)


def drafts_for(named: str | None) -> tuple[str, ...]:
    """Returns the drafts that `plan` may choose: the one that the user named, or with `auto` all that propose tokens
    and can be replayed without an artifact; none without a name."""
    if named is None:
        return ()
    if named != AUTO:
        return (named,)
    package = "coldpress.runtime.drafts"
    found = {name: plugins.load_class(package, Draft, name) for name in plugins.names(package)}
    return tuple(name for name, draft in found.items() if draft.PROPOSES and not draft.NEEDS_PLANES)


def own_cache_options(cache: str, options: Options) -> Options:
    known = plugins.load_class("coldpress.runtime.cache", CachePolicy, cache).OPTIONS.model_fields
    return {key: value for key, value in options.items() if key in known}


def own_options(method: str, options: Options) -> Options:
    known = load("coldpress.runtime.sparsity", Selector, method).OPTIONS.model_fields
    return {key: value for key, value in options.items() if key in known}


def with_attention(options: Options, spec: ModelSpec, layers_per_group: int) -> Options | None:
    """Returns the options of a dense run that streams attention, too; None if the user names its families, groups
    layers, or the decoder cannot compute the model with them."""
    found = {**own_options(DENSE, options), "families": "+".join((WHOLE_MLP, *ATTENTION))}
    if "families" in options or layers_per_group > 1:
        return None
    try:
        _families(DENSE, found, spec)
    except ColdpressError:
        return None
    return found


def families_for(method: str, options: Options, spec: ModelSpec) -> tuple[str, ...]:
    """Returns the families that a build may have on flash, without duplicates: those of `method` or of all candidates.

    Raises:
        ColdpressError: if the selector refuses its options, or the decoder cannot compute the model with its families.
    """
    if method != AUTO:
        return _families(method, options, spec)
    found: dict[str, None] = {}
    for name in candidates(spec, options):
        found |= dict.fromkeys(_families(name, own_options(name, options), spec))
    return tuple(found)


def _fits(method: str, options: Options, spec: ModelSpec) -> bool:
    selector = load("coldpress.runtime.sparsity", Selector, method)
    if selector.is_whole:
        return True  # if the user's options do not fit even a dense run, `families_for` says why
    try:
        _families(method, own_options(method, options), spec)
    except ColdpressError:
        return False
    return True


def _families(method: str, options: Options, spec: ModelSpec) -> tuple[str, ...]:
    selector = load("coldpress.runtime.sparsity", Selector, method)
    families = selector.families(spec, options_of(selector, options))
    _check_families(method, families, spec)
    return tuple(families)


def _check_families(method: str, families: Sequence[str], spec: ModelSpec) -> None:
    expected = missing_for_decoder(families, spec)
    if expected:
        raise ColdpressError(
            f"method={method} keeps {'+'.join(families)} on flash, expected {expected}; use method=dense or topk with "
            "the families that it has by default"
        )
