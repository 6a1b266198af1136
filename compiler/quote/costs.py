"""Counts what a build costs: disk, download, time, and the bytes that it writes to a device's flash."""

import os
from collections.abc import Sequence

from coldpress.compiler.checkpoint.shapes import Shape, Shapes
from coldpress.compiler.cost_model import flash_bytes
from coldpress.compiler.needs import PASS_THREADS, Build, all_needs, asked_text
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.quote.records import Estimate
from coldpress.compiler.quote.sources import QuoteSource
from coldpress.compiler.stage_seconds import FLOPS_PER_CORE, runtime_s
from coldpress.compiler.workflow.settings import BuildConfig, needs_gram, of_all_stages
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.sparsity import Sparsity

BYTES_PER_PARAMETER = 2
WITHIN = 2.0
"""Measured builds took 1 / WITHIN to WITHIN times their estimates (docs/experiments/builds.md)."""


def build_costs(
    source: QuoteSource, device: DeviceProfile, division: Sparsity, budgets: Sequence[int | str]
) -> dict[str, Estimate]:
    """Costs of a build with this division of one of `budgets`; for an artifact, of copying it."""
    units = flash_bytes(division.families, source.model.spec, division.formats)
    written = units + division.budget.resident_bytes + division.budget.predictor_bytes
    if source.build is None:
        size = source.artifact_bytes or written
        copied = Estimate(value=size, basis="the artifact's files as they are; another plan or format needs a build")
        return _costs(copied, copied, 0, "the artifact is built already", size)
    build = _build(source, source.build, device, division, budgets)
    stages = all_needs(build)
    disk_bytes = sum(stage.disk_bytes for stage in stages)
    download = Estimate(value=0, basis="a folder on this machine")
    if source.build.model.revision is not None:
        num_bytes = BYTES_PER_PARAMETER * source.model.num_parameters
        download = Estimate(value=num_bytes, basis=f"{BYTES_PER_PARAMETER} bytes a parameter, as hub models have")
    return _costs(
        Estimate(value=disk_bytes, basis="at most: all files of the build folder, with predictors of the largest size"),
        download,
        sum(runtime_s(stage, build) for stage in build.stages),
        f"an estimate for {build.threads} cores at {FLOPS_PER_CORE / 1e9:.0f} GFLOP/s each, by parameters and tokens, "
        f"without the download; measured builds took {1 / WITHIN:g} to {WITHIN:g} times their estimates",
        written,
    )


def _costs(disk: Estimate, download: Estimate, build_s: float, basis: str, written_bytes: int) -> dict[str, Estimate]:
    return {
        "disk_bytes": disk,
        "download_bytes": download,
        "build_s": Estimate(value=build_s, low=build_s / WITHIN, high=build_s * WITHIN, basis=basis),
        "written_bytes": Estimate(value=written_bytes, basis="the artifact, written once; decoding writes nothing"),
    }


def _build(
    source: QuoteSource, config: BuildConfig, device: DeviceProfile, division: Sparsity, budgets: Sequence[int | str]
) -> Build:
    shapes = Shapes(source.model.spec, {role: Shape(one.shape) for role, one in source.model.tensors.items()})
    settings = {stage: dict(values) for stage, values in of_all_stages(config).items()}
    settings["allocate"] |= {
        "method": division.method,
        "options": division.options,
        "format": division.format,
        "kv_cache": division.kv_cache,
        "context_length": division.context_length,
        "dram_budget": ",".join(map(str, budgets)),
    }
    tokens, block_tokens = asked_text(settings, shapes)
    predicts = load("coldpress.runtime.sparsity", Selector, division.method).NEEDS_PREDICTORS
    absent = {
        "importance": not config["imatrix"],
        "relufy": config["relufy"] == "off",
        "distill": not config["distill"],
        "predict": not predicts,
        "size": not predicts,
        "gram": not needs_gram(config),
        "export": not config["export"],
    }
    inputs = {stage: dict[str, str]() for stage in STAGES if not absent.get(stage, False)}
    threads = min(len(os.sched_getaffinity(0)), PASS_THREADS)
    return Build(shapes, settings, inputs, device, tokens, block_tokens, threads)
