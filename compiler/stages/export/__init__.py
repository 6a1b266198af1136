"""export: writes the compiled model as a file for another engine; each public file of this package is a format.

Reads only the published artifact, so another engine runs the same weights as our users: the codes as they were
quantized, after distillation. Reads and writes one tensor at a time. Off by default; a model that the other engine
would compute differently is refused in one sentence.
"""

import logging
from abc import abstractmethod
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic

from pydantic import Field
from typing_extensions import TypeVar

from coldpress.compiler.io import replacing, sha256_of
from coldpress.compiler.publishing import standing
from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.runtime.artifact.reader import Artifact, open_artifact
from coldpress.runtime.plugins import PluginBase, load, options_of
from coldpress.schemas.base import Options, Record
from coldpress.schemas.config import Key, OptionsOf
from coldpress.schemas.families import FormatName
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.package import Exported, Package
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
TARGETS = "coldpress.compiler.stages.export"
OptionsT = TypeVar("OptionsT", bound=Record, default=Any)


class Target(PluginBase, Generic[OptionsT]):
    """Writes a compiled model for another engine. The base class of all export formats."""

    @abstractmethod
    def check(self, spec: ModelSpec) -> None:
        """Refuses a model by its shape and its arithmetic alone, before anything is built. Raises ColdpressError if the
        other engine would compute something else."""

    @abstractmethod
    def write(self, model: StoredModel, options: OptionsT, path: Path) -> list[str]:
        """Writes the file; returns the names of the tensors whose values were rounded again. Raises as `check`."""

    @abstractmethod
    def disk_bytes(self, shapes: Mapping[str, tuple[int, ...]], stored: FormatName, options: OptionsT) -> int:
        """Returns the bytes of the file's tensors. `shapes` are those of all tensors of the model, by role, a tied head
        being its embedding; `stored` is the build's format."""


class ExportConfig(Record):
    """Settings of `export`."""

    export: Annotated[str | None, Key(plugins=TARGETS, default="none")] = Field(
        default=None, description="a file for another engine beside the artifact; gguf: for llama.cpp"
    )
    options: Annotated[Options, OptionsOf("export")] = Field(
        default={}, description="the format's own options, as JSON"
    )
    file: str = Field(description="path of the file to write")


def run(config: ExportConfig, package: Package) -> Exported:
    """Writes the file, whole or not at all; replaces an existing one.

    Raises:
        UnknownNameError: if there is no such format.
        ColdpressError: if the format cannot describe the model, or the artifact has changed.
        ArtifactError: if the reader refuses the artifact.
    """
    target = load(TARGETS, Target, config.export or "")
    artifact = open_artifact(standing(package), package.manifest_sha256)
    return exported(artifact, target, config.options, Path(config.file).absolute())


def exported(artifact: Artifact, target: Target, given: Options, path: Path) -> Exported:
    options = options_of(target, given)
    with replacing(path) as temporary:
        rounded = target.write(StoredModel(artifact), options, temporary)
        size_bytes = temporary.stat().st_size
    if rounded:
        LOG.info("export: %d tensors were rounded again, the first is %s", len(rounded), rounded[0])
    return Exported(
        target=target.name(),
        file=str(path),
        sha256=sha256_of(path),
        size_bytes=size_bytes,
        artifact_sha256=artifact.sha256,
        rounded=tuple(rounded),
    )


def needs(build: "Build") -> StageNeeds:
    """Counts the largest tensor three times in float32; the format gives the file's size. Raises ColdpressError if it
    cannot hold the model, so that `preflight` refuses what could not be exported."""
    settings, model = build.settings["export"], build.model
    target = load(TARGETS, Target, settings["export"])
    target.check(model.spec)
    shapes = {role: source.shape for role, source in model.tensors.items()}
    if model.spec.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    options = options_of(target, settings.get("options", {}))
    disk_bytes = target.disk_bytes(shapes, build.widest_format, options) + build.OVERHEAD_BYTES
    held = 3 * 4 * max(prod(source.shape) for source in model.tensors.values())
    return StageNeeds(stage="export", ram_bytes=build.PYTHON_BYTES + build.BLOCK_BYTES + held, disk_bytes=disk_bytes)
