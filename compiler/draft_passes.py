"""Replays the guesses of a draft model over text: how many drafts a pass should have, and the seconds of a token.

A pass computes its drafts one after another, checks them with the model, keeps those before the first wrong one, and
adds one token of the model's own. After a wrong guess the draft model would guess on from its own token; here it goes
on as sure as after the text's. Each block is a sequence of its own, whose accepted drafts say how sure later ones are.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coldpress.compiler.io import load_arrays
from coldpress.runtime.drafts import Acceptance
from coldpress.schemas.drafter import Drafter

COUNTS = (1, 2, 3, 4, 6, 8)
"""Numbers of drafts per pass that are compared."""
CERTAINTIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Least probabilities that all drafts so far are accepted with which one more is made."""
MODEL = "model"
"""The file of runtime/drafts that needs a draft model."""


class DraftedTokens(NamedTuple):
    draft_tokens: int
    certainty: float
    token_s: float
    """Modelled seconds of a token."""
    error: float
    """Their standard error over blocks."""
    tokens_per_pass: float
    drafts_per_pass: float

    @property
    def most_s(self) -> float:
        return self.token_s + self.error

    def in_words(self, name: str) -> str:
        return (
            f"drafts of {name}, up to {self.draft_tokens} a pass: {self.token_s:.4g} ± {self.error:.2g} s a token, "
            f"{self.tokens_per_pass:.2f} tokens and {self.drafts_per_pass:.2f} drafts a pass on validation text"
        )


def best_drafts(drafter: Drafter, pass_s: Sequence[float]) -> DraftedTokens:
    """Returns the number of drafts and the certainty with the fewest seconds a token; `pass_s`: seconds of the model's
    passes of 1, 2, ... tokens, one more than the largest of COUNTS."""
    found = load_arrays(drafter.arrays)
    known = found["right"].tobytes(), found["certainty"].tobytes(), found["right"].shape
    costs = np.array(pass_s) + drafter.token_s * np.arange(len(pass_s))
    ways = [_costed(count, least, costs, known) for count in COUNTS for least in CERTAINTIES]
    return min(ways, key=lambda way: (way.token_s, way.draft_tokens))


def _costed(count: int, least: float, costs: np.ndarray, known: tuple[bytes, bytes, tuple[int, int]]) -> DraftedTokens:
    passes_BN = _passes(count, least, *known)
    num_tokens, blocks = known[2][1], len(passes_BN)
    of_block = passes_BN @ costs[: count + 1] / num_tokens
    error = float(of_block.std(ddof=1) / blocks**0.5)
    passes, drafts = passes_BN.sum(), (passes_BN @ np.arange(count + 1)).sum()
    return DraftedTokens(count, least, float(of_block.mean()), error, blocks * num_tokens / passes, drafts / passes)


@functools.cache
def _passes(count: int, least: float, right: bytes, certainty: bytes, shape: tuple[int, int]) -> np.ndarray:
    """Returns the number of passes of each block that have 0, 1, ... `count` drafts, int64 [num_blocks, count + 1]."""
    right_BT, certainty_BT = np.frombuffer(right, bool), np.frombuffer(certainty, np.float32)
    rows = zip(right_BT.reshape(shape).tolist(), certainty_BT.reshape(shape).tolist(), strict=True)
    return np.stack([_passes_of(*row, count, least) for row in rows])


def _passes_of(right: list[bool], certainty: list[float], count: int, least: float) -> np.ndarray:
    passes, place, seen = np.zeros(count + 1, np.int64), 0, Acceptance()
    while place < len(right):
        drafts, accepted, sure, is_right, ratio = 0, 0, 1.0, True, seen.ratio
        while drafts < min(count, len(right) - place - 1) and (drafts == 0 or ratio * sure >= least):
            is_right = is_right and right[place + drafts]
            sure *= certainty[place + drafts]
            seen.expected += sure
            accepted += is_right
            drafts += 1
        passes[drafts] += 1
        seen.accepted += accepted
        place += accepted + 1
    return passes
