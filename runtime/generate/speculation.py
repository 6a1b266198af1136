"""Decodes speculatively: checks drafts of the next tokens in one pass, and keeps those that the model would choose.

Leviathan et al. 2022, for drafts without probabilities: a draft is accepted if it equals the token that the run chooses
from the model's logits, greedily or by its next seeded draw. So the tokens equal those of decoding one by one with the
same seed, and a draft of probability p under the run's settings is accepted with probability p, as by their rule. Where
two logits differ by less than the rounding of sums, whose order depends on what is in DRAM, either may be the larger:
drafts can change the choice just as another budget can.

LLM in a flash 5.2 caches the units of accepted tokens only. The cache decides before acceptance is known. So of a pass
of T tokens it admits the units of the first 1 + a (T - 1), where a is the share of drafts accepted so far.

A draft that computes (runtime/drafts/coarse.py) goes on while another draft pays, by its own probabilities and the law
of the artifact's device; no draft is made where the best number of them, by the drafts accepted so far, is none. The
numbers never change the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.drafts import Propose
from coldpress.runtime.generate.sampling import Chooser
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.simulate import pass_seconds
from coldpress.runtime.store import resident
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import Plan


@dataclass(frozen=True)
class Pass:
    token_ids: tuple[int, ...]
    """New tokens, at least one: the accepted drafts, and one more."""
    drafted: int


@dataclass(frozen=True)
class Costs:
    """Modelled seconds of drafting with the coarse planes, and of the passes that check the drafts."""

    draft_s: float
    pass_s: Sequence[float]
    """Seconds of passes of 1, 2, ... tokens that use every unit."""

    def token_s(self, count: int, acceptance: float) -> float:
        """Returns the seconds of a token, if passes check `count` drafts."""
        return (count * self.draft_s + self.pass_s[count]) / tokens_of_pass(count, acceptance)

    def best(self, most: int, acceptance: float) -> int:
        """Returns the number of drafts, at most `most`, with the fewest seconds a token; the fewest of equal ones, and
        none where no pass fits."""
        counts = range(min(most + 1, len(self.pass_s)))
        return min(counts, key=lambda count: self.token_s(count, acceptance), default=0)

    def least_chance(self, count: int, acceptance: float) -> float:
        """Returns the least chance of acceptance with which another draft pays: its seconds over those of a token, in
        passes that check `count` drafts."""
        further_s = (self.pass_s[-1] - self.pass_s[0]) / (len(self.pass_s) - 1)
        return (self.draft_s + further_s) / self.token_s(count, acceptance)


def tokens_of_pass(count: int, acceptance: float) -> float:
    """Returns the new tokens of a pass that checks `count` drafts.

    Draft n is of use if it and all before it are accepted: with probability acceptance ** n, if each is accepted
    independently (Leviathan et al. 2022, section 3.1).
    """
    return sum(acceptance**number for number in range(count + 1))


def costs_of(artifact: Artifact, plan: Plan, most: int) -> Costs:
    return Costs(resident.draft_seconds(artifact.manifest, plan), pass_seconds(artifact, plan, 1 + most))


def check_draft_tokens(count: int) -> None:
    """Raises `ColdpressError` for a number of drafts that one pass cannot check."""
    if not 1 <= count < FEW_TOKENS:
        raise ColdpressError(f"the number of drafts of a pass is {count}, expected 1 to {FEW_TOKENS - 1}")


class Passes:
    def __init__(
        self, decoder: Decoder, chooser: Chooser, propose: Propose, draft_tokens: int, costs: Costs | None = None
    ) -> None:
        """Takes a decoder that will have prefilled the prompt before the first `step`, and the costs of drafts that
        compute."""
        self._decoder, self._chooser = decoder, chooser
        self._propose, self._draft_tokens, self._costs = propose, draft_tokens, costs
        self._drafted = self._accepted = self._ended = 0

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
        self._ended += len(chosen) - 1 < len(drafts)
        return Pass(tuple(chosen), len(drafts))

    def _drafts(self, ids: Sequence[int], most: int) -> list[int]:
        """Makes as many drafts as pay, at most `most`; none once the plan of another budget refuses several tokens."""
        if self._decoder.sees_others:
            return []
        if self._costs is None:
            return self._propose(ids, most) if most else []
        # only drafts up to the first wrong one were checked
        acceptance = (self._accepted + 1) / (self._accepted + self._ended + 2)
        count = self._costs.best(most, acceptance)
        return self._propose(ids, most, self._costs.least_chance(count, acceptance)) if count else []

    def _expected(self, num_drafts: int) -> int:
        return 1 + round(num_drafts * self._acceptance)

    @property
    def _acceptance(self) -> float:
        """Returns the share of drafts that are accepted: a half before the first one (Laplace's rule)."""
        return (self._accepted + 1) / (self._drafted + 2)
