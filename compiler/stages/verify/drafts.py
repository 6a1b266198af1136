"""Continues test text greedily with each plan's own draft, and counts the drafts that the model accepts, pass by pass.

All other figures of `verify` are of given text, for which nothing drafts. Here the artifact writes as a user's run
does, and once more without drafts, to tell whether both write the same tokens. Flash is simulated, so that no figure
depends on a machine or its load.
"""

from collections import Counter

import numpy as np

from coldpress.runtime.drafts import NO_DRAFT, Draft, Drafting
from coldpress.runtime.generate.choice import SIMULATED, draft_of
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.plan.budget import choose_plan
from coldpress.runtime.plugins import load
from coldpress.schemas.layout import Plan, by_budget
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import PlanDrafts

PROMPT_TOKENS, NEW_TOKENS = 64, 64
"""Most tokens of the prompt, in which `lookup` finds what to propose, and of its continuation."""


def drafts_of_all(folder: str, manifest: Manifest, block: np.ndarray) -> tuple[PlanDrafts, ...]:
    """Returns the figures of each plan that drafts, the largest budget first; the first tokens of `block`, int32
    [block_tokens] of test text, are the prompt."""
    _, *others = by_budget(manifest.plans)[::-1]
    plans = [choose_plan(manifest), *(choose_plan(manifest, plan.dram_budget_bytes) for plan in others)]
    return tuple(_measured(folder, plan, block) for plan in plans if draft_of(plan, manifest)[0].PROPOSES)


def _measured(folder: str, plan: Plan, block: np.ndarray) -> PlanDrafts:
    assert plan.draft is not None
    prompt = block[: min(PROMPT_TOKENS, plan.context_length // 2)].tolist()
    drafting = _continued(folder, plan, prompt, None)
    alone = _continued(folder, plan, prompt, load("coldpress.runtime.drafts", Draft, NO_DRAFT))
    decoded = drafting[1:]  # the prefill gives the first
    accepted = Counter(token.pass_number for token in decoded if token.accepted)
    leading = [token for token in decoded if token.leads]
    return PlanDrafts(
        plan=plan.name,
        draft=plan.draft,
        drafted=tuple(token.drafted for token in leading),
        accepted=tuple(accepted[token.pass_number] for token in leading),
        same_tokens=[token.id for token in drafting] == [token.id for token in alone],
    )


def _continued(folder: str, plan: Plan, prompt: list[int], draft: Drafting | None) -> tuple[Token, ...]:
    """Returns the new tokens of a session of its own, so that both begin with the same units in DRAM."""
    count = min(NEW_TOKENS, plan.context_length - len(prompt))
    with Session(folder, plan=plan, flash=SIMULATED) as session:
        return session.generate(prompt, count, ignore_eos=True, draft=draft).tokens
