"""Prompt lookup: what followed the last tokens where they stood before, in the prompt or in what was generated.

Reads tokens alone. The longest end of the text is looked for first, and of its places the latest is taken; ends of
fewer than LEAST tokens say too little to pay for a check. The method is Saxena's prompt lookup decoding (2023), akin to
the retrieval from text that LLM in a flash names (REST, He et al. 2023).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from coldpress.runtime.drafts import Propose

MOST, LEAST = 4, 2
"""Tokens of the end that is looked for."""


class Draft:
    """See `coldpress.runtime.drafts.Drafting`."""

    @contextmanager
    def drafting(self, context_length: int) -> Iterator[Propose]:
        """See `coldpress.runtime.drafts.Drafting`."""
        yield _Index().propose


class _Index:
    """Where each run of LEAST to MOST tokens stood last, what follows it being known."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}

    def propose(self, ids: Sequence[int], count: int) -> list[int]:
        """What followed; `ids` begin with those of the call before."""
        for token in ids[len(self._ids) :]:
            # the runs that end before this token: nothing followed them until now
            for length in range(LEAST, min(MOST, len(self._ids)) + 1):
                self._behind[tuple(self._ids[-length:])] = len(self._ids)
            self._ids.append(token)
        for length in range(min(MOST, len(self._ids)), LEAST - 1, -1):
            place = self._behind.get(tuple(self._ids[-length:]))
            if place is not None:
                return self._ids[place : place + count]
        return []
