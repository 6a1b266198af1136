"""Runs the whole pipeline on a slice of the model, in one process, so that errors show within seconds, not hours.

The slice is the first layers with everything outside the layers, a few blocks of the corpus, and a DRAM budget that
gives each layer what it will have in the real build. Stages run as jobs do, from records and with the settings of the
build (compiler/job.py), so the trial runs the code that the build will run. Its results are deleted.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coldpress.compiler.checkpoint.private import private_folder
from coldpress.compiler.checkpoint.shapes import Shape, Shapes
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from coldpress.compiler.checkpoint.weight_files import source_file
from coldpress.compiler.io import digest, load_arrays, save_arrays, save_record
from coldpress.compiler.job import Job, config_of, run_job
from coldpress.compiler.needs import Build
from coldpress.compiler.stages import relufy
from coldpress.compiler.stages.preflight.budget import least_needs
from coldpress.schemas.corpus import Corpus, TokenBlocks
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import WHOLE_MLP, layers_of
from coldpress.schemas.model import Model, ModelSpec

LOG = logging.getLogger(__name__)
LAYERS = 2
TOKENS = 512
BLOCK_TOKENS = 64
"""Longest block; `TOKENS` calibration tokens are enough to train, choose and judge predictors."""
JUDGED_TOKENS = 16
"""Longest block of the other splits, whose tokens cost a product with the whole head in every pass."""
SHORTENED = {
    "relufy": {"relufy_steps": 1, "distill_blocks": 1, "validation_blocks": 1},
    "distill": {"distill_steps": 1, "distill_blocks": 1, "validation_blocks": 1},
    "predict": {"predictor_steps": 4},
    "verify": {"test_tokens": 8},
    "publish": dict.fromkeys(("max_ppl_ratio", "min_top1_agreement", "max_logit_error"), "off"),
}
"""Settings that shorten slow stages without hiding their errors, and that skip checks of quality, which two layers
cannot have."""
CONFIG = "config.json"
LAYERED_KEYS = ("layer_types", "no_rope_layers")
"""Lists in config.json with one entry per layer."""


def run(build: Build, model: Model, corpus: Corpus, device: DeviceProfile, folder: Path) -> int:
    """Runs all stages on a slice, in `folder`, which is removed afterwards; returns the number of layers. Raises a
    ColdpressError that names the stage that failed."""
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        few = slice_model(model, folder / "source")
        save_record(few, folder / "ingest.json")
        save_record(slice_corpus(corpus, folder / "tokenize"), folder / "tokenize.json")
        save_record(device, folder / "device.json")
        budget = slice_budget(build, replace(build, model=compiled(few, build.settings)))
        for stage in build.stages[build.stages.index("preflight") + 1 :]:
            _try(_job(stage, build, few.spec.num_hidden_layers, budget, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    LOG.info("preflight: all stages ran on %d layers in %.0f s", LAYERS, time.monotonic() - started)
    return few.spec.num_hidden_layers


def compiled(model: Model | Shapes, settings: Mapping[str, Mapping[str, Any]]) -> Model | Shapes:
    """Returns the model as the stages from `calibrate` on see it."""
    spec = relufy.relufied(model.spec, settings["relufy"]["relufy"])
    return model.model_copy(update={"spec": spec}) if isinstance(model, Model) else replace(model, spec=spec)


def slice_model(model: Model, folder: Path) -> Model:
    """Returns the first layers; writes their configuration into `folder`; weights stay in their files."""
    layers = sliced_layers(model.spec)
    shutil.copytree(private_folder(model), folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config: dict[str, Any] = {**read_object(folder / CONFIG, MAX_CONFIG_BYTES), "num_hidden_layers": layers}
    config |= {key: config[key][:layers] for key in LAYERED_KEYS if isinstance(config.get(key), list)}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    kept = {role: source for role, source in model.tensors.items() if _is_kept(role, layers)}
    return model.model_copy(
        update={
            "spec": model.spec.first_layers(layers),
            "folder": str(folder.resolve()),
            "private_files": tuple(map(source_file, sorted(folder.iterdir()))),
            "license_files": (),
            "tensors": kept,
            "weights_sha256": digest(model.weights_sha256, str(layers)),
            "num_parameters": sum(math.prod(source.shape) for source in kept.values()),
        }
    )


def slice_build(build: Build) -> Build:
    """Returns the build of the slice, as far as its needs depend on it; its DRAM can hold the whole slice."""
    layers = sliced_layers(build.model.spec)
    shapes = {role: Shape(tensor.shape) for role, tensor in build.model.tensors.items() if _is_kept(role, layers)}
    few = Shapes(build.model.spec.first_layers(layers), shapes)
    settings = {**build.settings, "allocate": {**build.settings["allocate"], "dram_budget": "100%"}}
    length = min(BLOCK_TOKENS, build.block_tokens)
    return replace(build, model=few, settings=settings, num_tokens=TOKENS, block_tokens=length)


def sliced_layers(spec: ModelSpec) -> int:
    """Returns the number of layers of the slice: those up to the `LAYERS`th whose MLP has units."""
    having = layers_of(WHOLE_MLP, spec)
    return having[min(LAYERS, len(having)) - 1] + 1


def _is_kept(role: str, layers: int) -> bool:
    return not role.startswith("layers.") or int(role.split(".")[1]) < layers


def slice_corpus(corpus: Corpus, folder: Path) -> Corpus:
    """Returns the beginning of each split's first blocks: `TOKENS` tokens of calibration, one block of the others."""
    found: list[TokenBlocks] = []
    for blocks in corpus.splits:
        calibrates = blocks.split == "calibration"
        length = min(BLOCK_TOKENS if calibrates else JUDGED_TOKENS, blocks.block_tokens)
        count = min(blocks.num_blocks, -(-TOKENS // length) if calibrates else 1)
        shape = (blocks.num_blocks, blocks.block_tokens)
        arrays = {
            name: values[:count, :length] if values.shape == shape else values
            for name, values in load_arrays(blocks.arrays).items()
        }
        saved = save_arrays(folder / f"{blocks.split}.safetensors", arrays)
        found.append(blocks.model_copy(update={"arrays": saved, "num_blocks": count, "block_tokens": length}))
    return corpus.model_copy(update={"splits": tuple(found)})


def slice_budget(build: Build, few: Build) -> int:
    """Returns bytes: what the slice must hold, and its layers' share of the build's remaining budget."""
    layers, all_layers = few.model.spec.num_hidden_layers, build.model.spec.num_hidden_layers
    rest = build.dram_budget_bytes - least_bytes(build)
    return least_bytes(few) + max(0, rest) * layers // all_layers


def least_bytes(build: Build) -> int:
    """Returns the least DRAM, whatever the sparsity; with `auto`, of the selector and formats that need the least."""
    return min(need.least_bytes for need in least_needs(build))


def _job(stage: str, build: Build, layers: int, budget: int, folder: Path) -> Job:
    fields = config_of(stage).model_fields
    changed = {"dram_budget": budget, "artifact": str(folder / f"{stage}.coldpress")}
    changed |= {"metrics": str(folder / "report.json"), "html": str(folder / "report.html")}
    changed |= {"file": str(folder / "exported"), "exported": (str(folder / "exported"),)}
    changed |= SHORTENED.get(stage, {})
    return Job(
        stage=stage,
        settings={**build.settings[stage], **{name: value for name, value in changed.items() if name in fields}},
        records={name: (folder / f"{source}.json",) for name, source in build.inputs[stage].items()},
        output=folder / f"{stage}.json",
        layers=tuple(range(layers)),
        threads=build.threads,
    )


def _try(job: Job) -> None:
    """Turns errors into a sentence that names the stage, and logs unexpected ones with their traceback."""
    try:
        run_job(job)
    except ColdpressError as error:
        raise ColdpressError(f"in a trial run on {LAYERS} layers, {job.stage} refused: {error}") from error
    except Exception as error:
        LOG.exception("preflight: %s failed", job.stage)
        raise ColdpressError(
            f"in a trial run on {LAYERS} layers, {job.stage} failed with {type(error).__name__}: {error}; the whole "
            "build would fail there, too"
        ) from error
