"""Lists the candidates of `method=auto`, for the stages before the choice (made by `allocate`) and for the rules.

Every selector that applies to the model is a candidate, and so are every format and every cache policy unless the user
names one: a new file of a plug-in package takes part without an edit. Selectors of exact zeros, and predictors, whose
training pays where zeros are exact, need such a model.
"""

from coldpress.runtime import plugins
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.drafts import Draft
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.quantization import Format
from coldpress.runtime.routing import PACKAGE, Routing
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import Options
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import (
    FAMILIES,
    FormatName,
    LayerFormats,
    UnitFormat,
    dense_family,
    missing_for_decoder,
    names_in,
    slice_formats,
    slices,
)
from coldpress.schemas.model import MLP_ROLES, ModelSpec, role_shape

AUTO = "auto"
DENSE = "dense"
ATTENTION = ("attn_in", "attn_out")
DEFAULT_FORMAT = "int4_group32"
"""The format of a build whose method is given and whose format is not."""


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
    return (named,) if named != AUTO else tuple(plugins.names("coldpress.runtime.quantization"))


def compared_formats(named: str, spec: ModelSpec) -> tuple[UnitFormat, ...]:
    """Returns the format that the user named, or those that are compared for a model. Where its rows and columns are
    whole blocks of llama.cpp's K formats, these take the place of all others in fewer than eight bits."""
    if named != AUTO:
        return (named,)
    found = {name: _format(name) for name in formats_for(AUTO)}
    fitting = [name for name, one in found.items() if one.IS_COMPARED and not misfit(name, spec)]
    in_super_blocks = any(found[name].MULTIPLE > 1 for name in fitting)
    return tuple(
        name for name in fitting if not in_super_blocks or found[name].MULTIPLE > 1 or found[name].nbytes(256) >= 256
    )


def misfit(format_name: FormatName, spec: ModelSpec) -> str | None:
    """Returns the matrix of a layer whose rows or columns a format cannot hold; None if it holds all."""
    multiple = _format(format_name).MULTIPLE
    if multiple == 1:
        return None
    roles = sorted({piece.role for family in FAMILIES for piece in slices(family, spec)} | set(spec.expanding_matrices))
    above = ("", *(f"layers.{layer}." for layer in range(spec.num_hidden_layers)))
    shared = [f"shared_expert.{role}" for role in MLP_ROLES] if spec.shared_intermediate_size else []
    names = [*(f"{each}{role}" for role in roles for each in above), *shared]
    found = (name for name in names if any(size % multiple for size in role_shape(spec, f"{name}.weight")))
    return next(found, None)


def fits_columns(formats: LayerFormats, spec: ModelSpec) -> bool:
    """Returns whether units with columns of down can have these formats."""
    return not any(misfit(name, spec) for name in names_in(formats))


def check_format(named: UnitFormat, spec: ModelSpec) -> None:
    """Raises ColdpressError, which names the matrix and other formats, if a format cannot hold a model's matrices."""
    names = () if named == AUTO else slice_formats(named)
    format_name, role = next(((name, role) for name in names if (role := misfit(name, spec))), ("", None))
    if role is None:
        return
    multiple = _format(format_name).MULTIPLE
    raise ColdpressError(
        f"format={format_name} stores {multiple} values in a block, and {role} has rows or columns that do not "
        f"fill whole blocks; use {' or '.join(compared_formats(AUTO, spec))}"
    )


def _format(name: FormatName) -> Format:
    return load("coldpress.runtime.quantization", Format, name)


def caches_for(named: str) -> tuple[str, ...]:
    """Returns the cache policies that a build may have: the one that the user named, or all that a run can follow."""
    if named != AUTO:
        return (named,)
    package = "coldpress.runtime.cache"
    found = plugins.names(package)
    return tuple(name for name in found if not plugins.load_class(package, CachePolicy, name).looks_ahead)


def routings_for(named: str, is_mixture: bool) -> tuple[str, ...]:
    """Returns the ways of routing besides the model's own that a search may take; none for a model without experts."""
    names = plugins.names(PACKAGE) if named == AUTO else (named,)
    return tuple(name for name in names if is_mixture and load(PACKAGE, Routing, name).SEES_RESIDENCY)


def drafts_for(named: str | None) -> tuple[str, ...]:
    """Returns the drafts that `plan` may choose: with `auto` all that propose tokens without a draft model."""
    if named is None:
        return ()
    if named != AUTO:
        return (named,)
    package = "coldpress.runtime.drafts"
    found = {name: plugins.load_class(package, Draft, name) for name in plugins.names(package)}
    return tuple(name for name, draft in found.items() if draft.PROPOSES and not draft.NEEDS_MODEL)


def own_cache_options(cache: str, options: Options) -> Options:
    known = plugins.load_class("coldpress.runtime.cache", CachePolicy, cache).OPTIONS.model_fields
    return {key: value for key, value in options.items() if key in known}


def own_options(method: str, options: Options) -> Options:
    known = load("coldpress.runtime.sparsity", Selector, method).OPTIONS.model_fields
    return {key: value for key, value in options.items() if key in known}


def with_attention(options: Options, spec: ModelSpec, layers_per_group: int) -> Options | None:
    """Returns the options of a dense run that streams attention, too; None if settings or the decoder forbid it."""
    found = {**own_options(DENSE, options), "families": "+".join((dense_family(spec), *ATTENTION))}
    if "families" in options or layers_per_group > 1:
        return None
    try:
        _families(DENSE, found, spec)
    except ColdpressError:
        return None
    return found


def families_for(method: str, options: Options, spec: ModelSpec) -> tuple[str, ...]:
    """Returns the families that a build may have on flash, without duplicates: those of `method` or of all candidates.
    Raises ColdpressError if the selector refuses its options, or the decoder cannot compute the model with them."""
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
    expected = missing_for_decoder(families, spec)
    if expected:
        raise ColdpressError(
            f"method={method} keeps {'+'.join(families)} on flash, expected {expected}; use method=dense or topk with "
            "the families that it has by default"
        )
    return tuple(families)
