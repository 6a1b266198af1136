"""Speculative decoding: drafts of next tokens are checked in one pass, and those that the model would have chosen stay.

Leviathan et al. 2022, with drafts that are certain of themselves: a draft is accepted if it is the very token that the
run chooses from the model's logits, greedily or by its next seeded draw. So tokens are those of decoding one by one,
drawn ones with the same seed, and a draft of probability p under the run's settings is accepted with probability p, as
by their rule. Where two logits are closer than the rounding of sums, whose order depends on what is in DRAM, either may
come out as the larger: with drafts as with another budget.

LLM in a flash 5.2: the cache keeps what tokens used that are accepted. It has to decide before that is known, so that
of T tokens it keeps the units of the first 1 + a (T - 1), with the share a of drafts that were accepted so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.drafts import Propose
from coldpress.runtime.generate.sampling import Chooser
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.schemas.errors import ColdpressError

DRAFT_TOKENS = 4
"""Drafts of a pass where nothing is said: what LLM in a flash 5.2 uses."""


@dataclass(frozen=True)
class Pass:
    """What one pass through the layers gave."""

    token_ids: tuple[int, ...]
    """New tokens, at least one: the accepted drafts, and one more."""
    drafted: int
    """Drafts that were checked."""


def no_drafts(ids: Sequence[int], count: int) -> list[int]:
    """Decoding token by token."""
    return []


def check_draft_tokens(count: int) -> None:
    """Refuses more drafts than a pass takes.

    Raises:
        ColdpressError: saying so.
    """
    if not 1 <= count < FEW_TOKENS:
        raise ColdpressError(f"the number of drafts of a pass is {count}, expected 1 to {FEW_TOKENS - 1}")


class Passes:
    """One pass after another of one run."""

    def __init__(self, decoder: Decoder, chooser: Chooser, propose: Propose, draft_tokens: int) -> None:
        """Takes the decoder behind the prefill of the prompt."""
        self._decoder, self._chooser = decoder, chooser
        self._propose, self._draft_tokens = propose, draft_tokens
        self._drafted = self._accepted = 0

    def step(self, ids: Sequence[int], room: int) -> Pass:
        """The next tokens.

        Args:
            ids: All tokens so far, the prompt among them; the decoder has all but the last.
            room: New tokens that may follow, at least one.
        """
        drafts = self._propose(ids, min(self._draft_tokens, room - 1)) if room > 1 else []
        logits = self._decoder.decode_many(np.array([ids[-1], *drafts]), self._expected(len(drafts)))
        chosen: list[int] = []
        for row, draft in zip(logits, [*drafts, None], strict=True):
            chosen.append(self._chooser.choose(row))
            if chosen[-1] != draft:
                break
        self._decoder.accept(len(chosen), 1 + len(drafts))
        self._drafted += len(drafts)
        self._accepted += len(chosen) - 1
        return Pass(tuple(chosen), len(drafts))

    def _expected(self, num_drafts: int) -> int:
        """Tokens of a pass that will stand, by the drafts so far and, as long as there are few, one in two."""
        return 1 + round(num_drafts * (self._accepted + 1) / (self._drafted + 2))
