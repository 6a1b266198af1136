"""Proposes nothing: each pass decodes one token, whatever the plan says."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from coldpress.runtime.drafts import Checked, Draft, Propose


class Plugin(Draft):
    """No drafts."""

    PROPOSES = False

    @contextmanager
    def drafting(self, context_length: int, checked: Checked | None = None) -> Generator[Propose]:
        yield _nothing


def _nothing(ids: Sequence[int], count: int, least_chance: float = 0.0, /) -> list[int]:
    return []
