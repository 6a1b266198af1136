"""Fixtures of tests in several folders."""

from tests.support.workflow import built, edited, tree, workflow

__all__ = ["built", "edited", "tree", "workflow"]
