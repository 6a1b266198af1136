"""Decides whether a plan proposes next tokens, which, and how many per pass (LLM in a flash 5.2).

A pass of several tokens reads what its tokens use together. Where every token uses every unit, that is what one token
reads, so each right draft saves a token's reads, and each draft costs computing. Under other selectors drafts lose
(`benchmarks.speculative`; docs/experiments, planes-10), and with the whole model in DRAM there is nothing to save.

The drafts of runtime/drafts are replayed over validation text. A draft is right if it is the text's next token: a
perfect model that samples would accept it as often. Each block gives one gain; their mean, less its standard error,
must exceed what `plan` asks of any change.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from coldpress.compiler.candidates import AUTO, drafts_for
from coldpress.compiler.draft_passes import COUNTS as MODEL_COUNTS
from coldpress.compiler.draft_passes import MODEL, best_drafts
from coldpress.compiler.seconds import WORTH, Setting
from coldpress.runtime.drafts import DRAFT_TOKENS, Draft
from coldpress.runtime.dram.budget import holds_everything
from coldpress.runtime.plugins import load
from coldpress.runtime.simulate import pass_seconds
from coldpress.runtime.sparsity import sees_others
from coldpress.schemas.drafter import Drafter
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import Plan

COUNTS = (1, 2, 4)
"""Numbers of drafts per pass that are compared."""


class Gain(NamedTuple):
    draft: str
    draft_tokens: int
    speed: float
    """Speed over that without drafts, mean over blocks."""
    error: float
    """Its standard error."""
    tokens_per_pass: float
    drafts_per_pass: float

    @property
    def least(self) -> float:
        return self.speed - self.error

    @property
    def in_words(self) -> str:
        spread = f" ± {self.error:.3f}" if math.isfinite(self.error) else ""
        known = "" if spread else " (one block, so the error is unknown)"
        return (
            f"drafts of {self.draft}, up to {self.draft_tokens} a pass: {self.speed:.3f}{spread} times as fast on "
            f"validation text{known}, {self.tokens_per_pass:.2f} tokens and {self.drafts_per_pass:.2f} drafts a pass"
        )


def with_draft_model(setting: Setting, drafter: Drafter) -> tuple[Plan, str]:
    """Returns the setting's plan with the draft model that `allocate` has divided the budget for, and the reason."""
    best = best_drafts(drafter, pass_seconds(setting.artifact, setting.plan, 1 + MODEL_COUNTS[-1]))
    drafts = {"draft": MODEL, "draft_tokens": best.draft_tokens, "draft_certainty": best.certainty}
    return setting.plan.model_copy(update=drafts), best.in_words(drafter.name)


def with_draft(named: str, setting: Setting, blocks: Callable[[], np.ndarray]) -> tuple[Plan, str]:
    """Adds a draft to the setting's plan, if it pays or is named; returns the plan and the reason. `named` is a file of
    runtime/drafts, or `auto`; `blocks` gives validation text, int [num_blocks, block_tokens], where drafts may pay.
    Raises ColdpressError if a draft is named, and a token changes what the next one uses."""
    plan = setting.plan
    why_not = _why_not(setting)
    if named != AUTO and sees_others(plan):
        raise ColdpressError(
            f"draft={named} was asked for, and {plan.method} uses what is in DRAM, so that a token of a pass would "
            "change what the others use; leave draft=auto, or choose use_read_units=false, with another method or "
            "cache=static"
        )
    if why_not and named == AUTO:
        return plan, f"no drafts: {why_not}"
    if why_not:
        return _drafting(plan, named, DRAFT_TOKENS), f"drafts of {named}, as given, not compared: {why_not}"
    found = gains(drafts_for(named), blocks(), pass_seconds(setting.artifact, plan, 1 + max(COUNTS)))
    best = max(found, key=lambda gain: (gain.least, gain.speed))
    if named != AUTO:
        return _drafting(plan, named, best.draft_tokens), f"{best.in_words}; as given"
    if best.least * WORTH <= 1:
        return plan, f"no drafts: the best of {len(found)} ways does not pay, {best.in_words}"
    return _drafting(plan, best.draft, best.draft_tokens), best.in_words


def _drafting(plan: Plan, draft: str, draft_tokens: int) -> Plan:
    return plan.model_copy(update={"draft": draft, "draft_tokens": draft_tokens})


def _why_not(setting: Setting) -> str | None:
    """Returns why drafts cannot be judged by this law, or save nothing; None if they may pay."""
    plan = setting.plan
    if sees_others(plan):
        return "a token of a pass would change what the others use, which depends on what is in DRAM"
    if holds_everything(plan, setting.sections):
        return "no unit is read once the model is loaded"
    if any(part.density < 1 for part in plan.parts):
        return "each drafted token uses different units, so that checking several reads more from flash"
    return None


def gains(names: Sequence[str], blocks: np.ndarray, pass_s: Sequence[float]) -> list[Gain]:
    """Returns the gain of each draft of `names`, files of runtime/drafts, with each of `COUNTS`, on `blocks` int
    [num_blocks, block_tokens]; `pass_s`: seconds of passes of 1, 2, ... tokens, one more than the largest of COUNTS."""
    found: list[Gain] = []
    written = blocks.shape[1] - 1
    for name in names:
        draft = load("coldpress.runtime.drafts", Draft, name)
        for count in COUNTS:
            runs = [replayed(draft, block.tolist(), count) for block in blocks]
            speeds = np.array([pass_s[0] * written / sum(pass_s[drafts] for drafts in run) for run in runs])
            # a single block says nothing about others
            error = float(speeds.std(ddof=1) / len(speeds) ** 0.5) if len(speeds) > 1 else math.inf
            passes, drafts = sum(map(len, runs)), sum(map(sum, runs))
            tokens = written * len(runs)
            found.append(Gain(name, count, float(speeds.mean()), error, tokens / passes, drafts / passes))
    return found


def replayed(draft: Draft, text: Sequence[int], draft_tokens: int) -> list[int]:
    """Replays a run that drafts, and writes `text` after its first token; returns the number of drafts in each pass. A
    pass proposes at most `draft_tokens`, keeps the first ones that are the text's, and adds one more
    (runtime/generate/speculation.py)."""
    seen, drafts = [text[0]], list[int]()
    with draft.drafting(len(text)) as propose:
        while len(seen) < len(text):
            proposed = propose(seen, min(draft_tokens, len(text) - len(seen) - 1))
            following = text[len(seen) : len(seen) + len(proposed)]
            right = [mine == true for mine, true in zip(proposed, following, strict=True)]
            num_right = right.index(False) if False in right else len(right)
            drafts.append(len(proposed))
            seen += text[len(seen) : len(seen) + num_right + 1]
    return drafts
