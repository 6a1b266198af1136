"""Dense: every unit, on every token."""

from compiler.allocate._rules import Question
from schemas.errors import ColdpressError
from schemas.families import FamilyName


def densities(question: Question) -> dict[FamilyName, tuple[float, ...]]:
    """1 everywhere.

    Raises:
        ColdpressError: if the user asked for less.
    """
    if question.density not in (None, 1):
        raise ColdpressError(
            f"density={question.density} was asked for, but method dense uses every unit; leave density out, or use "
            "method=topk"
        )
    return dict.fromkeys(question.families, (1.0,) * question.num_hidden_layers)
