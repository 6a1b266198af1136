"""Prompt lookup: proposes the tokens that followed the last tokens earlier in the prompt or in the generated text.

Needs only tokens. It looks for the last MOST tokens first, then for fewer, and takes the latest place; matches of fewer
than LEAST tokens predict too little to pay for a check. The method is Saxena's prompt lookup decoding (2023), similar
to the retrieval from text that LLM in a flash names (REST, He et al. 2023).
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from coldpress.runtime.drafts import Draft, Drafting, Propose

MOST, LEAST = 4, 2
"""Most and fewest tokens at the end of the text that are looked for."""


class Plugin(Draft):
    @contextmanager
    def drafting(self, context_length: int, model: Drafting | None = None) -> Generator[Propose]:
        yield Index().propose


class Index:
    """The latest place of each run of `least` to MOST tokens, except runs at the end, which nothing follows yet."""

    def __init__(self, least: int = LEAST) -> None:
        self._least = least
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}

    def propose(self, ids: Sequence[int], count: int, /) -> list[int]:
        """Returns at most `count` tokens that followed; `ids` begin with the ids of the previous call."""
        for token in ids[len(self._ids) :]:
            # This token follows the runs that end before it, so they have a continuation from now on.
            for length in range(self._least, min(MOST, len(self._ids)) + 1):
                self._behind[tuple(self._ids[-length:])] = len(self._ids)
            self._ids.append(token)
        for length in range(min(MOST, len(self._ids)), self._least - 1, -1):
            place = self._behind.get(tuple(self._ids[-length:]))
            if place is not None:
                return self._ids[place : place + count]
        return []
