"""Proposes nothing: each pass decodes one token, whatever the plan says."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from coldpress.runtime.drafts import Draft, Drafting, Propose


class Plugin(Draft):
    PROPOSES = False

    @contextmanager
    def drafting(self, context_length: int, model: Drafting | None = None) -> Generator[Propose]:
        yield nothing


def nothing(ids: Sequence[int], count: int, /) -> list[int]:
    return []
