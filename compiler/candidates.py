"""Lists the candidates of `method=auto`, for the stages before the choice (made by `allocate`) and for the rules.

A dense run is always a candidate. With exact zeros so are the methods that leave out only zeros, or units that a
predictor expects to be zero; otherwise pruning by magnitude, at the density that the user or the DRAM budget sets. For
a mixture of experts a dense run, of the experts that the router picks, is the only candidate.
"""

from collections.abc import Iterable

from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import Options
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FAMILIES
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
        ColdpressError: if the model is a mixture of experts and the runtime cannot run it with these families.
    """
    found: dict[str, None] = {}
    for name in methods_for(method, spec.exact_zeros, spec.is_mixture):
        selector = load("coldpress.runtime.sparsity", Selector, name)
        own = own_options(name, options) if method == AUTO else options
        families = selector.families(spec, options_of(selector, own))
        if spec.is_mixture:
            _check_mixture(name, families)
        found |= dict.fromkeys(families)
    return tuple(found)


def _check_mixture(method: str, families: Iterable[str]) -> None:
    """Refuses families with which the runtime cannot compute a mixture's MLP."""
    on_flash = {role for name in families for role in FAMILIES[name].roles}
    if "down_proj" not in on_flash or "expert" in families:
        raise ColdpressError(
            f"method={method} keeps {'+'.join(families)} on flash; a mixture of experts keeps down of all experts "
            "there, in units of one row or column; use method=dense or topk"
        )
