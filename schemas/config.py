"""The build configuration: what a user may say with `snakemake --config key=value`, and what that resolves to.

`Settings` are the keys that a model profile may set too, `BuildRequest` is everything a user may say, and `BuildConfig`
is the answer that the rules read: nothing open, model and device known. A field's description says which values it
takes, in words that complete "expected …".
"""

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import PositiveCount, Record, Share
from schemas.device import DeviceProfile
from schemas.families import FormatName, Method

RequestedMethod = Literal["auto", "dense", "relu", "predictor", "topk"]
PreflightMode = Literal["auto", "always", "off"]
"""Whether a small trial is run before the long stages: for large models, for all, or no check at all."""
NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
"""Names that become folders of the build: no separators, no leading or trailing dot or dash."""
Limit = Annotated[float, Field(gt=0)] | Literal["off"]
ShareLimit = Share | Literal["off"]
REVISION_PATTERN = r"^[0-9a-f]{40}$"


class Settings(Record):
    """Keys with a default that suits the model; None means: not said."""

    method: RequestedMethod | None = Field(default=None, description="auto, dense, relu, predictor or topk")
    density: float | None = Field(
        default=None, gt=0, le=1, description="the share of units used per token, above 0 and at most 1"
    )
    format: FormatName | None = Field(default=None, description="fp16, int8_group32 or int4_group32")
    dram_budget: int | str | None = Field(
        default=None, description="bytes such as 3GB, or a share of the dense footprint such as 50%"
    )
    order: str | None = Field(default=None, description="the name of an ordering heuristic")
    place: str | None = Field(default=None, description="the name of a placement solver")
    cache: str | None = Field(default=None, description="the name of a cache policy")
    distill: bool | None = Field(default=None, description="true or false")
    corpus: str | None = Field(
        default=None, description="pydoc, a .txt or .jsonl file, a folder of them, or a hub dataset"
    )
    corpus_revision: str | None = Field(
        default=None,
        pattern=REVISION_PATTERN,
        description="the 40 hexadecimal digits of the commit that a hub dataset is read at",
    )
    calibration_tokens: PositiveCount | None = Field(default=None, description="a whole number of tokens, at least 1")
    calibration_shards: PositiveCount | None = Field(default=None, description="a whole number of jobs, at least 1")
    context_length: PositiveCount | None = Field(default=None, description="a whole number of tokens, at least 1")
    seed: int | None = Field(default=None, ge=0, description="a whole number, at least 0")
    layers_per_job: PositiveCount | None = Field(default=None, description="a whole number of layers, at least 1")
    preflight: PreflightMode | None = Field(default=None, description="auto, always or off")
    max_ppl_ratio: Limit | None = Field(default=None, description="a number above 0 such as 1.05, or off")
    min_top1_agreement: ShareLimit | None = Field(default=None, description="a share from 0 to 1, or off")
    max_logit_error: Limit | None = Field(default=None, description="a number above 0 such as 0.01, or off")


class BuildRequest(Settings):
    """Every key of `--config`."""

    model: str = Field(default="demo", description="a model profile, a folder or a hub id")
    revision: str | None = Field(
        default=None, pattern=REVISION_PATTERN, description="the 40 hexadecimal digits of a hub commit"
    )
    device: str = Field(default="pixel6", description="a device profile or the path of one")
    label: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        description="letters, digits and .-_ between them: builds of other labels stay beside this one",
    )
    build_dir: str = Field(default="build", min_length=1, description="a folder")


class ModelReference(Record):
    """The model that was named: where it comes from, and the facts of its config.json that the DAG hangs on."""

    name: str = Field(pattern=NAME_PATTERN)
    """Profile name, or the last part of the folder or hub id; names the build folder and the artifact."""
    source: str
    """Hub id, or a folder: relative where it lies below the working directory, else absolute."""
    revision: str | None = Field(pattern=REVISION_PATTERN)
    """Commit of a hub model; None for a folder."""
    license: str | None
    """As the profile says; None leaves it to the model card."""
    num_hidden_layers: PositiveCount
    exact_zeros: bool
    """Whether the MLP's activation is ReLU, so that inactive units are exact zeros."""


class BuildConfig(Record):
    """The resolved configuration of one build; it stays in memory and never enters an artifact."""

    model: ModelReference
    device: DeviceProfile
    device_file: str
    """The profile that `device` was read from."""
    method: Method
    density: float | None
    """None: the allocator derives it from the DRAM budget."""
    format: FormatName
    dram_budget: int | str
    """Bytes, or a share of the dense footprint such as `50%`."""
    order: str
    place: str
    cache: str
    distill: bool
    corpus: str
    corpus_revision: str | None
    """Commit of a hub dataset; None for a corpus that is no dataset."""
    calibration_tokens: PositiveCount
    calibration_shards: PositiveCount
    """Jobs that calibration text is shared out to."""
    context_length: PositiveCount
    seed: int
    layers_per_job: PositiveCount
    preflight: PreflightMode
    max_ppl_ratio: Limit | None
    min_top1_agreement: ShareLimit | None
    max_logit_error: Limit | None
    """Gates of `publish`; None leaves them to it."""
    label: str | None
    build_dir: str

    @property
    def target(self) -> str:
        """Names build folder and artifact: the device, and the label behind a plus, which no device's name holds."""
        return self.device.name if self.label is None else f"{self.device.name}+{self.label}"
