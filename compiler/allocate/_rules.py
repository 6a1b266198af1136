"""What a density can follow from: the user, the budget (ActiveFlow 4.1), or what was measured (exact zeros)."""

from dataclasses import dataclass

from compiler.cost_model import llm_sparsity
from schemas.activations import Activations
from schemas.errors import ColdpressError
from schemas.families import FamilyName, Method

MIN_DENSITY = 0.05
"""Below it no published method keeps a model usable; a budget that asks for less gets slower, not sparser."""


@dataclass(frozen=True)
class Question:
    """All that a method may decide its densities by."""

    method: Method
    families: tuple[FamilyName, ...]
    num_hidden_layers: int
    density: float | None
    """What the user asked for."""
    activations: Activations
    m_max: int
    """The DRAM budget in bytes."""
    s_m: int
    """All weights in the chosen format, in bytes."""


def from_budget(question: Question) -> dict[FamilyName, tuple[float, ...]]:
    """The user's density, else 1 - sp with sp = 1 - M_max / S_m; the same in every layer and family.

    The paper's S_m is the whole model, all of it sparse. Here attention and embeddings stay dense in DRAM; taking them
    out of both terms would leave the MLP a far lower density at the same budget, and the budget is kept either way,
    since units that do not fit are read again.
    """
    density = question.density
    if density is None:
        density = max(MIN_DENSITY, 1 - llm_sparsity(question.m_max, question.s_m))
    return dict.fromkeys(question.families, (density,) * question.num_hidden_layers)


def measured(question: Question) -> dict[FamilyName, tuple[float, ...]]:
    """The share of units that are not exactly zero, layer by layer.

    Raises:
        ColdpressError: if the user asked for another, or zeros are not exact, or a family was not measured.
    """
    if question.density is not None:
        raise ColdpressError(
            f"density={question.density} was asked for, but method {question.method} uses exactly the units that are "
            "not zero; leave density out, or use method=topk"
        )
    if not question.activations.exact_zeros:
        raise ColdpressError(
            f"method {question.method} needs activations that are exactly zero (ReLU), and this model has none; "
            "use method=topk"
        )
    return {family: _measured_family(question, family) for family in question.families}


def _measured_family(question: Question, family: FamilyName) -> tuple[float, ...]:
    found = {
        entry.layer: statistics.density
        for entry in question.activations.layers
        for statistics in entry.families
        if statistics.family == family and statistics.density is not None
    }
    missing = [layer for layer in range(question.num_hidden_layers) if layer not in found]
    if missing:
        raise ColdpressError(
            f"layer {missing[0]}: no activation bits of family {family}; run calibrate with method={question.method}"
        )
    return tuple(found[layer] for layer in range(question.num_hidden_layers))
