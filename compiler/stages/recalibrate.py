"""recalibrate: the activity that later stages work from, on the model and at the densities that will run.

Where zeros are exact and the weights are those that `calibrate` saw, or where every unit is used, that is what
`calibrate` found, unchanged. Otherwise the calibration text passes once more: the units that the build's selector
chooses, of experts those that the router picks, are the active ones, and each layer sees what the layers before it left
(ActiveFlow 4.1, DIP 3.2).
"""

import logging
from typing import TYPE_CHECKING

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity, pass_needs
from coldpress.compiler.activity.choice import choice_of
from coldpress.compiler.activity.layer_counts import Activity, exact_families
from coldpress.compiler.activity.shards import merge
from coldpress.compiler.io import Workspace
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
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
    """Statistics with activity, or `activations` as they are where they hold already.

    With `shards`, where something had to be counted, they are put together.
    """
    same_weights = activations.weights_sha256 == model.weights_sha256
    chosen = choice_of(sparsity, model.spec)
    # what is not zero is what is used, or aimed at, where densities are those of the zeros
    exact = activations.are_exact(sparsity.families)
    known = sparsity.is_whole or (exact and chosen.selector.densities(True) == "measured")
    if same_weights and known:
        log.info("recalibrate: the first statistics hold, nothing is computed again")
        return activations.of_families(sparsity.families)
    if shards:
        return merge(shards, work)
    families = sparsity.families
    activity = Activity(exact_families(families, model.spec)) if known else Activity(frozenset(), chosen)
    return count_activity(config, model, corpus, families, activity, work, threads)


def needs(build: "Build") -> StageNeeds:
    """Nothing where the first statistics hold; else as calibrate, with the bits of every unit that the build has."""
    if not build.counts_again:
        return StageNeeds(stage="recalibrate", ram_bytes=build.PYTHON_BYTES, disk_bytes=0, runtime_s=60)
    return pass_needs("recalibrate", build, build.families, build.families)
