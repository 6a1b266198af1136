"""Decodes speculatively: checks drafts of the next tokens in one pass, and keeps those that the model would choose.

Leviathan et al. 2022, for drafts without probabilities: a draft is accepted if it equals the token that the run chooses
from the model's logits, greedily or by its next seeded draw. So the tokens equal those of decoding one by one with the
same seed, and a draft of probability p under the run's settings is accepted with probability p, as by their rule. Where
two logits differ by less than the rounding of sums, whose order depends on what is in DRAM, either may be the larger:
drafts can change the choice just as another budget can.

LLM in a flash 5.2 caches the units of accepted tokens only. The cache decides before acceptance is known. So of a pass
of T tokens it admits the units of the first 1 + a (T - 1), where a is the share of drafts accepted so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.drafts import Propose
from coldpress.runtime.generate.sampling import Chooser
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.schemas.errors import ColdpressError


@dataclass(frozen=True)
class Pass:
    token_ids: tuple[int, ...]
    """New tokens, at least one: the accepted drafts, and one more."""
    drafted: int


def check_draft_tokens(count: int) -> None:
    """Raises `ColdpressError` for a number of drafts that one pass cannot check."""
    if not 1 <= count < FEW_TOKENS:
        raise ColdpressError(f"the number of drafts of a pass is {count}, expected 1 to {FEW_TOKENS - 1}")


class Passes:
    def __init__(self, decoder: Decoder, chooser: Chooser, propose: Propose, draft_tokens: int) -> None:
        """Takes a decoder that will have prefilled the prompt before the first `step`."""
        self._decoder, self._chooser = decoder, chooser
        self._propose, self._draft_tokens = propose, draft_tokens
        self._drafted = self._accepted = 0

    def step(self, ids: Sequence[int], room: int) -> Pass:
        """Drafts, checks the drafts in one pass, and returns the tokens that it added. `ids` are all tokens so far,
        prompt included; the decoder has all but the last. At most `room` new tokens, at least one, may follow."""
        drafts = self._drafts(ids, min(self._draft_tokens, room - 1))
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

    def _drafts(self, ids: Sequence[int], most: int) -> list[int]:
        """Makes at most `most` drafts; none once the plan of another budget refuses several tokens."""
        return self._propose(ids, most) if most and not self._decoder.sees_others else []

    def _expected(self, num_drafts: int) -> int:
        return 1 + round(num_drafts * self._acceptance)

    @property
    def _acceptance(self) -> float:
        """Returns the share of drafts that are accepted: a half before the first one (Laplace's rule)."""
        return (self._accepted + 1) / (self._drafted + 2)
