"""ReLU: the density is whatever the activations have; nothing that counts is left out."""

from compiler.allocate._rules import Question, measured
from schemas.families import FamilyName


def densities(question: Question) -> dict[FamilyName, tuple[float, ...]]:
    """Measured shares of non-zeros per layer."""
    return measured(question)
