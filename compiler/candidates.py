"""What `method=auto` chooses among, for the stages that come before the choice (`allocate` makes it) and for the rules.

A dense run is always a candidate. Where zeros are exact so are the methods that leave out only zeros, or what a
predictor takes for them; without them pruning by magnitude, at the density that the user or the DRAM budget gives.
"""

from runtime._plugins import load, options_of
from schemas.base import Options
from schemas.model import ModelSpec

AUTO = "auto"


def methods_for(method: str, exact_zeros: bool) -> tuple[str, ...]:
    """`method` alone, or the candidates that `auto` stands for."""
    if method != AUTO:
        return (method,)
    return ("dense", "relu", "predictor") if exact_zeros else ("dense", "topk")


def candidates(spec: ModelSpec) -> tuple[str, ...]:
    """The methods that are compared for a model."""
    return methods_for(AUTO, spec.exact_zeros)


def own_options(method: str, options: Options) -> Options:
    """Of the options of a build whose method is open, those that a candidate has."""
    return {
        key: value for key, value in options.items() if key in load("runtime.sparsity", method).Options.model_fields
    }


def families_for(method: str, options: Options, spec: ModelSpec) -> tuple[str, ...]:
    """The families that a build may have on flash, each once: those of `method`, or of all candidates."""
    found: dict[str, None] = {}
    for name in methods_for(method, spec.exact_zeros):
        selector = load("runtime.sparsity", name)
        own = own_options(name, options) if method == AUTO else options
        found |= dict.fromkeys(selector.families(spec, options_of(selector, own)))
    return tuple(found)
