"""calibrate: one pass over the calibration text that counts which units fire (PowerInfer 6.1, Ripple 4.1).

Counts every family that any selector could put on flash, so another method or other options need no second
calibration. A ReLU model has exact zeros, so its activity is known now. For other models only magnitudes are known
until `allocate` has chosen densities and `recalibrate` counts again.
"""

import logging
from typing import TYPE_CHECKING

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity, pass_needs
from coldpress.compiler.activity.expert_counts import in_words
from coldpress.compiler.activity.layer_counts import ActivityRule, countable_families, exact_families
from coldpress.compiler.activity.shards import merge
from coldpress.compiler.io import Workspace
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

log = logging.getLogger(__name__)


class CalibrateConfig(PassConfig):
    """Settings of `calibrate`."""


def run(
    config: CalibrateConfig,
    model: Model,
    corpus: Corpus,
    work: Workspace,
    threads: int,
    shards: tuple[Activations, ...] | None = None,
) -> Activations:
    """Returns statistics of every layer; activity only for families whose inactive units are exactly zero. With
    `shards` nothing is computed: their statistics are merged; raises ColdpressError if they do not belong to the text.
    """
    families = countable_families(model.spec)
    activity = ActivityRule(exact_families(families, model.spec))
    found = merge(shards, work) if shards else count_activity(config, model, corpus, families, activity, work, threads)
    if found.experts is not None:
        log.info("calibrate: %s", in_words(found.experts))
    return found


def needs(build: "Build") -> StageNeeds:
    families = countable_families(build.model.spec)
    return pass_needs("calibrate", build, families, exact_families(families, build.model.spec))
