"""What `method=auto` chooses among, for the stages that come before the choice (`allocate` makes it) and for the rules.

A dense run is always a candidate. Where zeros are exact so are the methods that leave out only zeros, or what a
predictor takes for them; without them pruning by magnitude, at the density that the user or the DRAM budget gives. Of a
mixture of experts that a router has chosen already, a dense run is the only candidate.
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
    """`method` alone, or the candidates that `auto` stands for."""
    if method != AUTO:
        return (method,)
    if is_mixture:
        return ("dense",)
    return ("dense", "relu", "predictor") if exact_zeros else ("dense", "topk")


def candidates(spec: ModelSpec) -> tuple[str, ...]:
    """The methods that are compared for a model."""
    return methods_for(AUTO, spec.exact_zeros, spec.is_mixture)


def own_options(method: str, options: Options) -> Options:
    """Of the options of a build whose method is open, those that a candidate has."""
    known = load("coldpress.runtime.sparsity", Selector, method).OPTIONS.model_fields
    return {key: value for key, value in options.items() if key in known}


def families_for(method: str, options: Options, spec: ModelSpec) -> tuple[str, ...]:
    """The families that a build may have on flash, each once: those of `method`, or of all candidates.

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
