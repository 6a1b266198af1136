"""Counts what a build costs: disk, download, time, and the bytes that it writes to a device's flash."""

from dataclasses import dataclass

from coldpress.compiler.checkpoint.shapes import Shape, Shapes
from coldpress.compiler.cost_model import flash_bytes
from coldpress.compiler.needs import Build, all_needs
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.quote.sources import Source
from coldpress.compiler.stages.preflight import asked_text
from coldpress.compiler.workflow.settings import BuildConfig, needs_gram, needs_predictors, of_all_stages
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.sparsity import Sparsity

BYTES_PER_PARAMETER = 2
"""In hub models."""


@dataclass(frozen=True)
class Costs:
    """Costs of a build, and the basis of each figure in words."""

    disk_bytes: int
    disk_basis: str
    download_bytes: int
    download_basis: str
    build_s: int
    build_basis: str
    written_bytes: int


def build_costs(source: Source, device: DeviceProfile, division: Sparsity) -> Costs:
    """Returns the costs of a build with this division; for an artifact, the costs of copying it."""
    units = flash_bytes(division.families, source.model.spec, division.format)
    written = units + division.budget.resident_bytes + division.budget.predictor_bytes
    if source.build is None:
        size = source.artifact_bytes or written
        copied = "the artifact's files as they are; another plan or format needs a build"
        return Costs(size, copied, size, copied, 0, "the artifact is built already", size)
    stages = all_needs(_build(source, source.build, device))
    local = source.build.model.revision is None
    return Costs(
        sum(stage.disk_bytes for stage in stages),
        "at most: all files of the build folder, with predictors of the largest size",
        0 if local else BYTES_PER_PARAMETER * source.model.num_parameters,
        "a folder on this machine" if local else f"{BYTES_PER_PARAMETER} bytes a parameter, as hub models have",
        sum(stage.runtime_s for stage in stages),
        "at most: the sum of the time limits that the stages get on a cluster, which suit one core of a slow machine",
        written,
    )


def _build(source: Source, config: BuildConfig, device: DeviceProfile) -> Build:
    shapes = Shapes(source.model.spec, {role: Shape(one.shape) for role, one in source.model.tensors.items()})
    settings = {stage: dict(values) for stage, values in of_all_stages(config).items()}
    tokens, block_tokens = asked_text(settings, shapes)
    absent = {
        "importance": not config["imatrix"],
        "relufy": config["relufy"] == "off",
        "distill": not config["distill"],
        "predict": not needs_predictors(config),
        "size": not needs_predictors(config),
        "gram": not needs_gram(config),
        "export": not config["export"],
    }
    inputs = {stage: dict[str, str]() for stage in STAGES if not absent.get(stage, False)}
    return Build(shapes, settings, inputs, device, tokens, block_tokens, 1)
