"""Measures the further plans of an artifact on the same test text, and lists the figures of all of them. Each is
decoded as a user would have it: the runtime is given the plan's budget."""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from coldpress.compiler.block_statistics import perplexity
from coldpress.compiler.stages.verify.decoded import Decoded
from coldpress.compiler.stages.verify.divergence import SourceComparison
from coldpress.runtime.plan.budget import holds_everything
from coldpress.schemas.layout import Plan, by_budget, placed_parts
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import PlanFigures

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
