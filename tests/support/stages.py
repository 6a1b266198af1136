"""The stages of a build that asks for nothing special, of which tests want runs."""

from coldpress.compiler.pipeline import STAGES

OPTIONAL = frozenset({"importance", "relufy", "explore", "distill", "gram", "export"})
"""Run where a setting asks for them."""
DEFAULT = tuple(stage for stage in STAGES if stage not in OPTIONAL)


def between(first: str, last: str) -> tuple[str, ...]:
    """From one stage to another, both included, in order."""
    return DEFAULT[DEFAULT.index(first) : DEFAULT.index(last) + 1]
