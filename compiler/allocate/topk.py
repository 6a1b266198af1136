"""Top-k: as dense as the budget allows (ActiveFlow 4.1), the same share in every layer and family."""

from compiler.allocate._rules import Question, from_budget
from schemas.families import FamilyName


def densities(question: Question) -> dict[FamilyName, tuple[float, ...]]:
    """The user's density, else 1 - sp of the budget."""
    return from_budget(question)
