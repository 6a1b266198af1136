"""What next tokens might be, before the model has said so: drafts, which the model then checks in one pass.

A file is a draft that needs no model; its module has a class `Draft` with the member of `Drafting`. A wrong draft costs
reads, never a token: what is not the model's own choice is taken back (runtime/generate/speculation.py). A second
artifact as a draft is in runtime/generate/draft_model.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

Propose = Callable[[Sequence[int], int], list[int]]
"""(all tokens so far, count) -> what may follow them, at most `count` ids, possibly none."""


class Drafting(Protocol):
    """What a run needs of a draft."""

    def drafting(self, context_length: int) -> AbstractContextManager[Propose]:
        """A new sequence of at most `context_length` tokens, for as long as the context is open.

        Raises:
            ColdpressError: if there can be none now.
        """
        ...
