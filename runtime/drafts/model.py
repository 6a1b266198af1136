"""Proposes what a smaller model would write, or where the text repeats itself, what followed there.

The smaller model lies in the artifact and computes its tokens with all of its weights in DRAM
(runtime/generate/draft_model.py). A repetition of MOST tokens costs nothing and is as sure, so that it comes first.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from coldpress.runtime.drafts import Draft, Drafting, Propose
from coldpress.runtime.drafts.lookup import MOST, Index


class Plugin(Draft):
    NEEDS_MODEL = True

    @contextmanager
    def drafting(self, context_length: int, model: Drafting | None = None) -> Generator[Propose]:
        assert model is not None, "the session opens the draft model"
        repeats = Index(least=MOST)
        with model.drafting(context_length) as likely:

            def propose(ids: Sequence[int], count: int, /) -> list[int]:
                return repeats.propose(ids, count) or likely(ids, count)

            yield propose
