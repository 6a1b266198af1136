"""The sources of a density: the user, the budget (ActiveFlow 4.1), or a measurement (exact zeros). The selector picks
one (runtime/sparsity: `densities`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coldpress.compiler.activity.counted import counted
from coldpress.compiler.cost_model import llm_sparsity
from coldpress.runtime.sparsity import DensitySource
from coldpress.schemas.activations import Activations
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import layers_of, resident_share, used_share
from coldpress.schemas.model import ModelSpec

MIN_DENSITY = 0.05
"""Share of the MLP's weights on flash. No published method keeps a model usable below it; a budget that asks for less
gets slower, not sparser."""


@dataclass(frozen=True)
class Question:
    method: str
    families: tuple[str, ...]
    spec: ModelSpec
    density: float | None
    """The share of the MLP's weights that the user set."""
    activations: Activations
    m_max: int
    """The DRAM budget in bytes."""
    s_m: int
    """All weights in the chosen format, in bytes."""
    allocate: Callable[[float], Mapping[str, tuple[float, ...]]]
    """Divides the MLP's density among families and layers, as density_allocation says."""


def densities(question: Question, source: DensitySource) -> dict[str, tuple[float, ...]]:
    """Returns the density of every layer, per family.

    Raises:
        ColdpressError: if the user's density does not go with the method, or the model has no exact zeros.
    """
    found = {
        "whole": _whole,
        "measured": _measured,
        "budget": _allocated,
        "capped": _capped,
    }
    return found[source](question)


def _whole(question: Question) -> dict[str, tuple[float, ...]]:
    """Returns 1 everywhere; for experts, the share that a router picks for a token."""
    if question.density not in (None, 1):
        raise ColdpressError(
            f"density={question.density} was asked for, but method {question.method} uses every unit; leave density "
            "out, or use method=topk"
        )
    return {
        family: (used_share(family, question.spec),) * question.spec.num_hidden_layers for family in question.families
    }


def _wanted(question: Question) -> float:
    """Returns the user's density, else 1 - sp with sp = 1 - M_max / S_m, as a share of the MLP's weights; for a
    mixture, relative to the experts that a token uses.

    The paper's S_m is the whole model, all of it sparse. Here attention and embeddings stay dense in DRAM. Taking them
    out of both terms would leave the MLP a far lower density at the same budget. The budget holds either way, since
    units that do not fit are read again.
    """
    if question.density is not None:
        return question.density
    used = min(used_share(family, question.spec) for family in question.families)
    resident = resident_share(question.families, question.spec)
    least = resident + (1 - resident) * MIN_DENSITY
    return max(least, min(1.0, (1 - llm_sparsity(question.m_max, question.s_m)) / used))


def _allocated(question: Question) -> dict[str, tuple[float, ...]]:
    return dict(question.allocate(_wanted(question)))


def _capped(question: Question) -> dict[str, tuple[float, ...]]:
    _need_exact_zeros(question)
    return {
        family: tuple(map(min, shares, _measured_family(question, family)))
        for family, shares in _allocated(question).items()
    }


def _measured(question: Question) -> dict[str, tuple[float, ...]]:
    if question.density is not None:
        raise ColdpressError(
            f"density={question.density} was asked for, but method {question.method} uses exactly the units that are "
            "not zero; leave density out, or use method=topk"
        )
    _need_exact_zeros(question)
    return {family: _measured_family(question, family) for family in question.families}


def _need_exact_zeros(question: Question) -> None:
    if not question.activations.exact_zeros:
        raise ColdpressError(
            f"method {question.method} needs activations that are exactly zero (ReLU), and this model has none; "
            "use method=topk"
        )


def _measured_family(question: Question, family: str) -> tuple[float, ...]:
    found = {layer: counted(question.activations, layer, family).density for layer in layers_of(family, question.spec)}
    return over_layers(family, question.spec, {layer: share for layer, share in found.items() if share is not None})


def over_layers(family: str, spec: ModelSpec, having: Mapping[int, float]) -> tuple[float, ...]:
    """Returns the density of every layer; a layer without units of the family counts as one that uses all."""
    whole = used_share(family, spec)
    return tuple(having.get(layer, whole) for layer in range(spec.num_hidden_layers))
