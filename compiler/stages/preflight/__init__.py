"""preflight: refuses early, with numbers, a build that would fail after hours.

Before the long stages it computes what each of them needs (compiler/needs.py). It refuses what no setting of Snakemake
can fix: a stage that needs more memory than the machine has, if all jobs run on it; a disk that is too small; a DRAM
budget below what must stay resident; far fewer calibration tokens than wanted. It reports the model's licence. Then
all stages run once on two layers (compiler/stages/preflight/trial.py): for models whose weights take 1 GB or more,
since smaller ones build about as fast, or for all with preflight=always.
"""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from coldpress.compiler.candidates import AUTO
from coldpress.compiler.checkpoint.shapes import Shapes, why_shorter
from coldpress.compiler.device import memory
from coldpress.compiler.needs import PASS_THREADS, Build, Inputs, all_needs, asked_text, needs_of
from coldpress.compiler.stages.preflight import budget, trial
from coldpress.runtime.plugins import load
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import PositiveCount, Record
from coldpress.schemas.config import Key
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import Preflight, StageNeeds

LOG = logging.getLogger(__name__)
LARGE_BYTES = 10**9
"""Stored weights of this size or more get a trial run, and too short a corpus is refused."""
LEAST_TOKEN_SHARE = 0.5
"""Share of the wanted calibration tokens that a large model's corpus must have."""
PREDICTOR_TOKENS = 64
"""Fewest calibration tokens that a predictor can be trained on (compiler/stages/predict/__init__.py)."""
TEXT_STAGES = ("calibrate", "recalibrate", "predict", "place", "order")
"""Stages that need less memory with fewer calibration tokens."""
REMEDY = "or set preflight=off to try anyway"


@dataclass(frozen=True)
class Download:
    """The part of a hub model that is not downloaded yet."""

    num_bytes: int
    folder: Path


NOTHING = Download(0, Path())


class PreflightConfig(Record):
    """Settings of `preflight`, including those of all other stages of the build."""

    preflight: Annotated[Literal["auto", "always", "off"], Key()] = Field(
        default="auto",
        description="before anything long, memory, disk, tokens, licence and budget are checked and all stages tried "
        "on two layers; auto: tried for large models only; off: no check at all",
    )
    folder: str = Field(description="folder of the model's build, as build/<model>; its disk is what counts")
    settings: dict[str, dict[str, JsonValue]] = Field(description="JSON: stage, to its settings by their names")
    inputs: Inputs = Field(
        description="JSON: each stage of the build, to its record parameters and the stages whose records they take"
    )
    shards: PositiveCount = Field(default=1, description="jobs that calibration text is divided among")
    here: bool = Field(
        default=False, description="whether all jobs run on this machine, so that its memory limits them"
    )


def run(
    config: PreflightConfig, model: Model, corpus: Corpus, device: DeviceProfile, scratch: Path, threads: int
) -> Preflight:
    """Checks memory, disk, tokens and budget, and returns what it found if the build may begin.

    Raises:
        DoesNotFitError: if memory, disk or the DRAM budget is too small.
        ColdpressError: if there are too few tokens, or a stage fails in the trial.
    """
    blocks = corpus.split("calibration")
    found_tokens = blocks.num_blocks * blocks.block_tokens
    wanted = int(str(config.settings["tokenize"]["calibration_tokens"]))
    free_ram, free_disk = memory.free_dram_bytes(), _free_disk_bytes(Path(config.folder))
    stages: tuple[StageNeeds, ...] = ()
    trial_layers = 0
    if config.preflight != "off":
        build = _build_of(config, model, device, (found_tokens, blocks.block_tokens), threads)
        thorough = is_tried(config.preflight, build)
        _log_license(model)
        if wanted < blocks.block_tokens:
            LOG.warning("preflight: calibration_tokens=%d is below a block, %d; give more", wanted, blocks.block_tokens)
        _check_tokens(wanted, build.method, corpus.name, found_tokens, thorough)
        _check_shards(config.shards, blocks.num_blocks)
        budget.check(build)
        stages = all_needs(build)
        if config.here:
            check_ram(stages, free_ram)
        check_disk(stages, free_disk, Path(config.folder), device.name)
        if thorough:
            trial_layers = trial.run(build, model, corpus, device, scratch)
    return Preflight(
        stages=stages,
        free_ram_bytes=free_ram,
        free_disk_bytes=free_disk,
        calibration_tokens=found_tokens,
        wanted_calibration_tokens=wanted,
        license=model.license,
        trial_layers=trial_layers,
    )


def needs(build: Build) -> StageNeeds:
    """Returns, with a trial, what the later stages take for the slice, one after another."""
    mode = build.settings["preflight"]["preflight"]
    if mode == "off" or not is_tried(mode, build):
        return StageNeeds(stage="preflight", ram_bytes=build.TORCH_BYTES, disk_bytes=0)
    few = trial.slice_build(build)
    tried = [needs_of(stage, few) for stage in few.stages[few.stages.index("preflight") + 1 :]]
    most = max(needs.ram_bytes for needs in tried) + build.TORCH_BYTES
    return StageNeeds(stage="preflight", ram_bytes=most, disk_bytes=0)


def is_tried(mode: str, build: Build) -> bool:
    """Returns whether all stages run once on two layers."""
    return mode == "always" or build.weight_bytes >= LARGE_BYTES


def check_shapes(config: PreflightConfig, model: Shapes, device: DeviceProfile) -> Build:
    """Refuses what config.json alone decides; returns the build.

    Raises:
        DoesNotFitError: if the DRAM budget is too small.
        ColdpressError: if the context is longer than the model holds.
    """
    build = _build_of(config, model, device, asked_text(config.settings, model), 1)
    longest = build.model.spec.max_position_embeddings
    if build.context_length > longest:
        raise ColdpressError(
            f"context_length={build.context_length} was asked for, the model holds {longest} tokens"
            f"{why_shorter(model.promised_tokens, model.spec)}; use a shorter one"
        )
    budget.check(build)
    return build


def check_download(
    config: PreflightConfig, model: Shapes, device: DeviceProfile, download: Download, threads: int | None
) -> None:
    """Refuses a build before its model is downloaded, judging by config.json and the hub's index. `threads` is None if
    jobs run on other machines, whose memory is not checked.

    Raises:
        DoesNotFitError: if memory, disk or the DRAM budget is too small for the full calibration text.
    """
    build = replace(check_shapes(config, model, device), threads=min(threads or 1, PASS_THREADS))
    stages = all_needs(build)
    if threads is not None:
        check_ram(stages, memory.free_dram_bytes())
    folder = Path(config.folder)
    check_disk(stages, _free_disk_bytes(folder), folder, device.name, download)


def check_ram(stages: tuple[StageNeeds, ...], free_bytes: int) -> None:
    """Refuses the build if a job of any stage needs more than free memory; Snakemake decides how many run at once."""
    most = max(stages, key=lambda needs: needs.ram_bytes)
    needed = show_bytes(most.ram_bytes)
    LOG.info("preflight: %s needs the most memory, %s; %s are free", most.stage, needed, show_bytes(free_bytes))
    if most.ram_bytes > free_bytes:
        shorter = "lower calibration_tokens, " if most.stage in TEXT_STAGES else ""
        raise DoesNotFitError(
            f"{most.stage} needs {needed} of memory, this machine has {show_bytes(free_bytes)} free; "
            f"free some, {shorter}{REMEDY}"
        )


def check_disk(
    stages: tuple[StageNeeds, ...], free_bytes: int, folder: Path, device: str, download: Download = NOTHING
) -> None:
    """Refuses the build if `download`, perhaps to another disk, and build together still need more disk space than is
    free. Array files of earlier runs are overwritten, in `folder`, and in its subfolder named like the device."""
    same_disk = bool(download.num_bytes) and _disk_of(download.folder) == _disk_of(folder)
    free_for_download = free_bytes if same_disk else _free_disk_bytes(download.folder)
    if download.num_bytes > free_for_download:
        raise DoesNotFitError(
            f"the model's download needs {show_bytes(download.num_bytes)} on disk in {download.folder}, has "
            f"{show_bytes(free_for_download)}; free some, point HF_HOME to another disk, {REMEDY}"
        )
    free_bytes -= download.num_bytes if same_disk else 0
    needed = sum(
        max(0, needs.disk_bytes - (0 if needs.stage == "package" else _present_bytes(folder, device, needs.stage)))
        for needs in stages
    )
    LOG.info("preflight: %s of disk are needed in %s, %s are free", show_bytes(needed), folder, show_bytes(free_bytes))
    if needed > free_bytes:
        largest = max(stages, key=lambda needs: needs.disk_bytes)
        raise DoesNotFitError(
            f"the build needs {show_bytes(needed)} on disk in {folder}, has {show_bytes(free_bytes)}"
            f"{' once the model is downloaded' if same_disk else ''} (most of it, "
            f"{show_bytes(largest.disk_bytes)}, for {largest.stage}); free some, choose another build_dir, {REMEDY}"
        )


def _present_bytes(folder: Path, device: str, stage: str) -> int:
    homes = (top / name for top in (folder, folder / device) for name in (stage, f"{stage}-shards"))
    # a link, to the checkpoint or into a cache, takes no room here, and deleting it frees none
    return sum(file.lstat().st_size for home in homes for file in home.rglob("*.safetensors"))


def _build_of(
    config: PreflightConfig, model: Model | Shapes, device: DeviceProfile, text: tuple[int, int], threads: int
) -> Build:
    """`text`: tokens of the calibration text, and of its blocks."""
    settings: Mapping[str, Mapping[str, Any]] = {**config.settings, "preflight": {"preflight": config.preflight}}
    whole = trial.compiled(model, settings)
    return Build(whole, settings, config.inputs, device, *text, min(threads, PASS_THREADS), config.shards)


def _check_tokens(wanted: int, method: str, corpus: str, found: int, thorough: bool) -> None:
    text = f"the corpus {corpus} gives {found:,} calibration tokens, {wanted:,} were asked for"
    predicts = method != AUTO and load("coldpress.runtime.sparsity", Selector, method).NEEDS_PREDICTORS
    if (thorough and found < LEAST_TOKEN_SHARE * wanted) or (predicts and found < PREDICTOR_TOKENS):
        raise ColdpressError(f"{text}; give more text, or set calibration_tokens={found} if that is enough")
    LOG.log(logging.WARNING if found < LEAST_TOKEN_SHARE * wanted else logging.INFO, "preflight: %s", text)


def _check_shards(shards: int, num_blocks: int) -> None:
    if shards > num_blocks:
        raise ColdpressError(
            f"calibration_shards={shards} was asked for, the text has {num_blocks} calibration blocks; use fewer "
            "shards or more calibration_tokens"
        )


def _log_license(model: Model) -> None:
    if model.license is None:
        LOG.warning("preflight: %s names no licence; look for one before you pass the artifact on", model.name)
    else:
        LOG.info("preflight: %s is under the licence %s, and so is its artifact", model.name, model.license)


def _free_disk_bytes(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _disk_of(folder: Path) -> int:
    return _existing(folder).stat().st_dev


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
