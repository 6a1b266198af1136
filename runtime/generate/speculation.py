"""Decodes speculatively: checks drafts of the next tokens in one pass, and keeps those that the model would choose.

Leviathan et al. 2022, for drafts without probabilities: a draft is accepted if it equals the token that the run chooses
from the model's logits, greedily or by its next seeded draw. So the tokens equal those of decoding one by one with the
same seed, and a draft of probability p under the run's settings is accepted with probability p, as by their rule. Where
two logits differ by less than the rounding of sums, whose order depends on what is in DRAM, either may be the larger:
drafts can change the choice just as another budget can.

LLM in a flash 5.2 caches the units of accepted tokens only. The cache decides before acceptance is known. So of a pass
of T tokens it admits the units of the first 1 + a (T - 1), where a is the share of drafts accepted so far.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.drafts import Propose


@dataclass(frozen=True)
class Pass:
    token_ids: tuple[int, ...]
    """New tokens of a sequence, at least one: the accepted drafts, and one more."""
    drafted: int


class Drafts:
    """The drafts of one sequence, and how many of them were right so far."""

    def __init__(self, propose: Propose) -> None:
        self._propose = propose
        self._drafted = self._accepted = 0

    def next(self, ids: Sequence[int], most: int) -> list[int]:
        """Drafts at most `most` tokens that follow `ids`, all tokens so far."""
        return self._propose(ids, most) if most > 0 else []

    def num_expected(self, num_drafts: int) -> int:
        """Returns the number of tokens that a pass with `num_drafts` drafts probably adds: of each draft the share
        that was accepted so far, a half before the first one (Laplace's rule)."""
        return 1 + round(num_drafts * (self._accepted + 1) / (self._drafted + 2))

    def check(self, drafts: Sequence[int], logits_TV: np.ndarray, choose: Callable[[np.ndarray], int]) -> Pass:
        """Chooses tokens as long as they equal the drafts, and one more, from the logits float32 [T, V] of the last
        token and of each draft."""
        chosen = list[int]()
        for row, draft in zip(logits_TV, [*drafts, None], strict=True):
            chosen.append(choose(row))
            if chosen[-1] != draft:
                break
        self._drafted += len(drafts)
        self._accepted += len(chosen) - 1
        return Pass(tuple(chosen), len(drafts))


@dataclass(frozen=True)
class Turn:
    """A sequence's part in a pass."""

    sequence: int
    """Its number in the decoder."""
    ids: Sequence[int]
    """All tokens so far, prompt included; the decoder has all but the last."""
    drafts: Drafts
    most: int
    """Most drafts."""
    choose: Callable[[np.ndarray], int]
    """Chooses a token from logits float32 [V]."""


def decode(decoder: Decoder, turns: Sequence[Turn]) -> list[tuple[Pass, np.ndarray]]:
    """Drafts for each of several sequences, checks all drafts in one pass, and takes back those that are wrong. Returns
    for each sequence its new tokens, and the logits that they were chosen from, float32 [T, V]."""
    # the plan of another budget may refuse several tokens at once
    alone = decoder.selection.sees_others
    drafts = [[] if alone else turn.drafts.next(turn.ids, turn.most) for turn in turns]
    tokens = [np.array([turn.ids[-1], *each]) for turn, each in zip(turns, drafts, strict=True)]
    kept = [turn.drafts.num_expected(len(each)) for turn, each in zip(turns, drafts, strict=True)]
    sequences, counts = [turn.sequence for turn in turns], list(map(len, tokens))
    logits = np.split(decoder.decode_each(tokens, sequences, kept), np.cumsum(counts)[:-1])
    found = [turn.drafts.check(each, rows, turn.choose) for turn, each, rows in zip(turns, drafts, logits, strict=True)]
    decoder.accept([len(one.token_ids) for one in found], counts, sequences)
    return list(zip(found, logits, strict=True))
