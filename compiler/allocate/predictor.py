"""Predictor: the density of what is to be predicted, measured where zeros are exact, else from the budget.

What a predictor then uses is more, because it must not miss much; `predict` finds how much.
"""

from compiler.allocate._rules import Question, from_budget, measured
from schemas.families import FamilyName


def densities(question: Question) -> dict[FamilyName, tuple[float, ...]]:
    """Measured shares of non-zeros per layer; without exact zeros, the user's density or 1 - sp of the budget."""
    return measured(question) if question.activations.exact_zeros else from_budget(question)
