"""Lists the candidates of `method=auto`, for the stages before the choice (made by `allocate`) and for the rules.

A dense run is always a candidate. With exact zeros so are the methods that leave out only zeros, or units that a
predictor expects to be zero; otherwise pruning by magnitude, at the density that the user or the DRAM budget sets. For
a mixture of experts a dense run, of the experts that the router picks, is the only candidate.
"""

from collections.abc import Sequence

from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import Options
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import missing_for_decoder
from coldpress.schemas.model import ModelSpec

AUTO = "auto"


def methods_for(method: str, exact_zeros: bool, is_mixture: bool) -> tuple[str, ...]:
    """Returns `method` alone, or the candidates of `auto`."""
    if method != AUTO:
        return (method,)
    if is_mixture:
        return ("dense",)
    return ("dense", "relu", "predictor") if exact_zeros else ("dense", "topk")


def candidates(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the methods that are compared for a model."""
    return methods_for(AUTO, spec.exact_zeros, spec.is_mixture)


def own_options(method: str, options: Options) -> Options:
    """Selects the options that a candidate has, from a build whose method is open."""
    known = load("coldpress.runtime.sparsity", Selector, method).OPTIONS.model_fields
    return {key: value for key, value in options.items() if key in known}


def families_for(method: str, options: Options, spec: ModelSpec) -> tuple[str, ...]:
    """Returns the families that a build may have on flash, without duplicates: those of `method` or of all candidates.

    Raises:
        ColdpressError: if a selector refuses its options, or the decoder cannot compute the model with its families.
    """
    found: dict[str, None] = {}
    for name in methods_for(method, spec.exact_zeros, spec.is_mixture):
        selector = load("coldpress.runtime.sparsity", Selector, name)
        own = own_options(name, options) if method == AUTO else options
        families = selector.families(spec, options_of(selector, own))
        _check_families(name, families, spec)
        found |= dict.fromkeys(families)
    return tuple(found)


def _check_families(method: str, families: Sequence[str], spec: ModelSpec) -> None:
    """The runtime's decoder can compute the model with these families on flash."""
    expected = missing_for_decoder(families, spec)
    if expected:
        raise ColdpressError(
            f"method={method} keeps {'+'.join(families)} on flash, expected {expected}; use method=dense or topk with "
            "the families that it has by default"
        )
