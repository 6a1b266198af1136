"""Measures the further plans of an artifact on the same test text, and lists the figures of all of them. Each is
decoded as a user would have it: the runtime is given the plan's budget.

Nothing drafts for given text. So a plan with a draft of its own also continues the text greedily, as a user's run does,
and its drafts that the model accepts are counted pass by pass; and once more without drafts, to tell whether both write
the same tokens. Flash is simulated, so that no figure depends on a machine or its load.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from coldpress.compiler.block_statistics import perplexity
from coldpress.compiler.stages.verify.decoded import Decoded
from coldpress.compiler.stages.verify.divergence import SourceComparison
from coldpress.runtime.drafts import NO_DRAFT, Draft, Drafting
from coldpress.runtime.generate.choice import SIMULATED, draft_of
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.plan.budget import choose_plan, holds_everything
from coldpress.runtime.plugins import load
from coldpress.schemas.layout import Plan, by_budget, placed_parts
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import PlanDrafts, PlanFigures

LOG = logging.getLogger(__name__)


def figures_of_all(
    manifest: Manifest,
    default: tuple[Decoded, SourceComparison],
    under: Callable[[Plan], tuple[Decoded, SourceComparison]],
    nll_source: Sequence[float],
) -> tuple[PlanFigures, ...]:
    """Returns the figures of all plans, the largest first; none if there is one plan alone. `default` has the text
    under the largest plan, and what has received its logits; `under` decodes it under another."""
    largest, *others = by_budget(manifest.plans)[::-1]
    if not others:
        return ()
    found = [figures_of(manifest, largest, *default, nll_source)]
    for plan in others:
        found.append(figures_of(manifest, plan, *under(plan), nll_source))
        LOG.info("verify: plan %s: perplexity %.4f", plan.name, found[-1].ppl_artifact)
    return tuple(found)


def figures_of(
    manifest: Manifest, plan: Plan, decoded: Decoded, watch: SourceComparison, nll_source: Sequence[float]
) -> PlanFigures:
    """`watch` has received the plan's logits; `nll_source`: mean nats per token of each block, of the source."""
    run, artifact, source = decoded.run, np.array(decoded.block_nll), np.array(nll_source)
    ppl_artifact, error = perplexity(artifact)
    ratio, ratio_error = perplexity(artifact - source)
    return PlanFigures(
        plan=plan.name,
        dram_budget_bytes=run.dram_budget_bytes,
        dram_used_bytes=run.dram_used_bytes,
        method=plan.method,
        cache=plan.cache,
        density=density_of(manifest, plan),
        holds_everything=holds_everything(plan, manifest.flash.sections),
        ppl_artifact=ppl_artifact,
        ppl_artifact_error=error,
        ppl_ratio=ratio,
        ppl_ratio_error=ratio_error,
        top1_agreement=watch.top1_agreement()[0],
        mean_kld=watch.divergence().mean_kld,
        reads_per_token=run.reads / run.num_tokens,
        flash_bytes_per_token=run.read_bytes / run.num_tokens,
        hit_rate=run.hit_rate,
        modelled_tokens_per_s=run.modelled_tokens_per_s,
        simulated_equals_real=decoded.simulated_equals_real,
    )


def density_of(manifest: Manifest, plan: Plan) -> float:
    """Returns the mean share of the bytes of all units that a token uses."""
    parts = placed_parts(plan, manifest.flash.sections)
    total = sum(section.num_units * section.unit_bytes for _, section in parts)
    return sum(part.density * section.num_units * section.unit_bytes for part, section in parts) / total


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
