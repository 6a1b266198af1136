"""Estimates the seconds of a stage, for a cluster's limits and the quote of a build: one constant per stage."""

from collections.abc import Mapping

from coldpress.compiler.needs import Build
from coldpress.compiler.shared_settings import WHOLE

FLOPS_PER_CORE = 100e9
"""Speed of a core in float32: products of matrices on an AMD EPYC with AVX-512."""
START_S = 3
"""Seconds until a process begins to work, in the mean of those that import torch and those that do not."""
PASSES: Mapping[str, float] = {
    "ingest": 0.2,
    "preflight": 0.6,
    "calibrate": 1,
    "explore": 1,
    "gram": 1.5,
    "predict": 3,
    "size": 6,
    "allocate": 8,
    "recalibrate": 1,
    "order": 0.3,
    "quantize": 0.2,
    "route": 8,
    "draft": 0.5,
    "verify": 3,
}
"""Passes of the text through the model that take as long as the stage; others take less than a tenth of one. Measured
on SmolLM2-135M and Qwen2.5-Coder-1.5B (docs/experiments/builds.md), those of predictors on four layers of a 7B."""
WHOLE_PASSES = 50
"""Passes of an `explore` that measures everything: 615 s for SmolLM2-135M."""
GRAM_PASSES = 2
"""Further passes of a `quantize` that corrects rounding by Gram matrices, on one core."""
UPDATE_PASSES = 4
"""Passes of a weight update: the student's forward and, twice as long, backward, and the teacher's forward."""
DOWNLOAD_S = 3600
"""Time assumed for a model whose size is not known yet."""
LIMIT_START_S, LIMIT_TIMES = 600, 10
"""A job has surely ended after so many seconds, to start and to wait for a busy file system, and so many times its
estimate: on cores and disks a tenth as fast."""


def runtime_s(stage: str, build: Build) -> float:
    """Estimates the seconds that a stage takes as one job on the build's threads."""
    settings = build.settings
    tokens = max(
        build.num_tokens, settings["tokenize"]["evaluation_tokens"], settings["explore"].get("explore_tokens", 0)
    )
    passes = PASSES.get(stage, 0.0)
    if stage == "explore" and settings["explore"].get("explore") == WHOLE:
        passes = WHOLE_PASSES
    if stage == "quantize" and build.has("gram"):
        passes += GRAM_PASSES
    if stage in ("allocate", "route", "verify"):
        passes *= len(str(settings["allocate"]["dram_budget"]).split(","))
    if stage in ("relufy", "distill"):
        updates = settings[stage][f"{stage}_steps"]
        passes = UPDATE_PASSES * updates * settings["distill"]["distill_blocks"] * build.block_tokens / tokens
    return START_S + passes * 2 * build.model.num_parameters * tokens / (FLOPS_PER_CORE * build.threads)


def limit_s(estimate_s: float) -> float:
    """Returns the seconds after which a job has surely ended, also on a slow machine."""
    return LIMIT_START_S + LIMIT_TIMES * estimate_s
