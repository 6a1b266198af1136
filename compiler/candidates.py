"""What `method=auto` chooses among, for the stages that come before the choice (`allocate` makes it) and for the rules.

A dense run is always a candidate. Where zeros are exact so are the methods that leave out only zeros, or what a
predictor takes for them; without them pruning by magnitude, at the density that the user or the DRAM budget gives. Of a
mixture of experts that a router has chosen already, a dense run is the only candidate.
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
        ColdpressError: if the model is a mixture of experts, and one of them is none that such a model runs with.
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
    """What the runtime can compute a mixture's MLP with."""
    on_flash = {role for name in families for role in FAMILIES[name].roles}
    if "down_proj" not in on_flash or "expert" in families:
        raise ColdpressError(
            f"method={method} keeps {'+'.join(families)} on flash; a mixture of experts keeps down of all experts "
            "there, in units of one row or column; use method=dense or topk"
        )
