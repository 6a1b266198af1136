"""recalibrate: the activity that later stages use, counted on the model and at the densities that will run; of several
DRAM budgets, the smallest one's.

The result of `calibrate` is passed on unchanged if zeros are exact and the weights are the same, or if every unit is
used, in a mixture every block of the experts whose uses `calibrate` counted. Otherwise the calibration text passes once
more: the units that the build's selector chooses (and, for experts, that the router picks) count as active, and each
layer sees what the pruned layers before it produce (ActiveFlow 4.1, DIP 3.2).
"""

import logging
from typing import TYPE_CHECKING

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity, pass_needs
from coldpress.compiler.activity.choice import choice_of
from coldpress.compiler.activity.expert_counts import with_blocks
from coldpress.compiler.activity.layer_counts import ActivityRule, exact_families
from coldpress.compiler.activity.shards import merge
from coldpress.compiler.io import Workspace
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.families import BLOCKS
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

log = logging.getLogger(__name__)


class RecalibrateConfig(PassConfig):
    """Settings of `recalibrate`."""


def run(
    config: RecalibrateConfig,
    model: Model,
    corpus: Corpus,
    sparsity: Sparsity,
    activations: Activations,
    work: Workspace,
    threads: int,
    shards: tuple[Activations, ...] | None = None,
) -> Activations:
    """Returns statistics with activity: merged `shards`, counted anew, or `activations` if they are still valid."""
    sparsity = sparsity.smallest
    same_weights = activations.weights_sha256 == model.weights_sha256
    chosen = choice_of(sparsity, model.spec)
    # with measured densities the nonzero units are exactly those that the selector uses or a predictor should find
    exact = activations.are_exact(sparsity.families)
    in_blocks = BLOCKS in sparsity.families  # all of them are used, or all of a token's experts
    known = sparsity.is_whole or in_blocks or (exact and chosen.selector.densities(True) == "measured")
    families = tuple(name for name in sparsity.families if name != BLOCKS)
    if (same_weights and known) or not families:
        log.info("recalibrate: the first statistics are still valid, nothing is computed again")
        found = activations.of_families(families)
        return with_blocks(found, model.spec, work) if in_blocks else found
    if shards:
        return merge(shards, work)
    activity = ActivityRule(exact_families(families, model.spec)) if known else ActivityRule(frozenset(), chosen)
    return count_activity(config, model, corpus, families, activity, work, threads)


def needs(build: "Build") -> StageNeeds:
    if not build.counts_again:
        bits = build.layer_units(build.families) * build.num_tokens // 8 * build.model.spec.is_mixture
        return StageNeeds(
            stage="recalibrate",
            ram_bytes=build.PYTHON_BYTES + 2 * bits,
            disk_bytes=build.model.spec.num_hidden_layers * bits,
        )
    return pass_needs("recalibrate", build, build.families, build.families)
