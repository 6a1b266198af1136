"""Lists the stages of a default build, for tests that run a range of them."""

from coldpress.compiler.pipeline import STAGES

OPTIONAL = frozenset({"importance", "relufy", "explore", "draft", "distill", "gram", "route", "export"})
"""Stages that run only if a setting asks for them."""
DEFAULT = tuple(stage for stage in STAGES if stage not in OPTIONAL)


def between(first: str, last: str) -> tuple[str, ...]:
    """Returns the default stages from `first` to `last`, both included, in order."""
    return DEFAULT[DEFAULT.index(first) : DEFAULT.index(last) + 1]
