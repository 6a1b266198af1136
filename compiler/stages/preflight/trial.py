"""The whole pipeline on a slice of the model, in one process: what would fail after hours fails after seconds.

The slice is the first layers with everything outside the layers, a few blocks of the corpus, and a DRAM budget that
leaves each layer what it will have in the real build. Stages run as jobs do, with the settings of the build and from
records (compiler/job.py), so what is tried is the code that will run. Nothing of it is kept.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from coldpress.compiler.candidates import AUTO, families_for, methods_for, own_options
from coldpress.compiler.checkpoint.private import private_folder
from coldpress.compiler.checkpoint.shapes import Shapes
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from coldpress.compiler.cost_model import HasShapes, kv_cache_bytes, read_buffer_bytes, resident_bytes
from coldpress.compiler.io import digest, load_arrays, save_arrays, save_record, sha256_of
from coldpress.compiler.job import STAGES, Job, config_of, records_of, run_job, writer_of
from coldpress.compiler.sections import bookkeeping_bytes, make_sections
from coldpress.compiler.stages import relufy
from coldpress.compiler.stages.quantize._weights import Algorithm
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import Options
from coldpress.schemas.corpus import Corpus, TokenBlocks
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FormatName, Method
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.model import Model, ModelSpec, SourceFile

M = TypeVar("M", Model, Shapes)
LOG = logging.getLogger(__name__)
LAYERS = 2
TOKENS = 512
BLOCK_TOKENS = 64
"""Calibration tokens, enough for predictors to be trained, chosen and judged on; and how long a block is at most."""
SHORTENED = {
    "relufy": {"steps": 1, "blocks_per_step": 1, "validation_blocks": 1},
    "distill": {"steps": 1, "blocks_per_step": 1, "validation_blocks": 1},
    "predict": {"steps": 4},
    "verify": {"test_tokens": 8},
    "publish": dict.fromkeys(("max_ppl_ratio", "min_top1_agreement", "max_logit_error"), "off"),
}
"""Settings of what takes long and fails no sooner for it, or says nothing of two layers: their quality."""
CONFIG = "config.json"
LAYERED_KEYS = ("layer_types",)
"""Lists in config.json with one entry per layer."""


@dataclass(frozen=True)
class Build:
    """What the build will be made with."""

    settings: Mapping[str, Mapping[str, Any]]
    """Stage -> its settings."""
    dram_budget_bytes: int
    distill: bool
    threads: int

    @property
    def method(self) -> Method:
        """How active units are found."""
        return self.settings["allocate"]["method"]

    @property
    def options(self) -> Options:
        """The selector's own."""
        return self.settings["allocate"].get("options", {})

    @property
    def format(self) -> FormatName:
        """How weights are stored."""
        return self.settings["allocate"]["format"]

    @property
    def context_length(self) -> int:
        """Tokens that the KV cache holds."""
        return self.settings["allocate"]["context_length"]

    @property
    def kv_cache(self) -> KvCacheFormat:
        """How it is kept."""
        return self.settings["allocate"]["kv_cache"]

    @property
    def layers_per_group(self) -> int:
        """Consecutive layers whose units lie together on flash."""
        return self.settings["allocate"]["layers_per_group"]


def run(build: Build, model: Model, corpus: Corpus, device: DeviceProfile, folder: Path) -> int:
    """Runs all stages on a slice; gives its number of layers.

    Args:
        build: Its settings.
        model: The whole model.
        corpus: The whole corpus.
        device: As in the build.
        folder: Scratch space; removed afterwards.

    Raises:
        ColdpressError: naming the stage that failed.
    """
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        few = slice_model(model, folder / "source")
        save_record(few, folder / "ingest.json")
        save_record(slice_corpus(corpus, folder / "tokenize"), folder / "tokenize.json")
        save_record(device, folder / "device.json")
        whole = compiled(model, build.settings)
        budget = slice_budget(whole, compiled(few, build.settings), build, device.flash.page_bytes.value)
        stages = _stages(build, whole.spec)
        for stage in stages[stages.index("preflight") + 1 :]:
            _try(_job(stage, build, stages, few.spec.num_hidden_layers, budget, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    LOG.info("preflight: all stages ran on %d layers in %.0f s", LAYERS, time.monotonic() - started)
    return few.spec.num_hidden_layers


def compiled(model: M, settings: Mapping[str, Mapping[str, Any]]) -> M:
    """The model as the stages from `calibrate` on see it."""
    asked = settings["relufy"]
    spec = relufy.relufied(model.spec, asked["activation"], asked["threshold"])
    return model.model_copy(update={"spec": spec}) if isinstance(model, Model) else replace(model, spec=spec)


def slice_model(model: Model, folder: Path) -> Model:
    """The model's first `LAYERS` layers, with a configuration of its own in `folder`; weights stay where they are."""
    layers = min(LAYERS, model.spec.num_hidden_layers)
    shutil.copytree(private_folder(model), folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config: dict[str, Any] = {**read_object(folder / CONFIG, MAX_CONFIG_BYTES), "num_hidden_layers": layers}
    config |= {key: config[key][:layers] for key in LAYERED_KEYS if isinstance(config.get(key), list)}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    kept = {
        role: source
        for role, source in model.tensors.items()
        if not role.startswith("layers.") or int(role.split(".")[1]) < layers
    }
    return model.model_copy(
        update={
            "spec": model.spec.model_copy(update={"num_hidden_layers": layers}),
            "folder": str(folder.resolve()),
            "private_files": tuple(
                SourceFile(name=path.name, size_bytes=path.stat().st_size, sha256=sha256_of(path))
                for path in sorted(folder.iterdir())
            ),
            "license_files": (),
            "tensors": kept,
            "weights_sha256": digest(model.weights_sha256, str(layers)),
            "num_parameters": sum(math.prod(source.shape) for source in kept.values()),
        }
    )


def slice_corpus(corpus: Corpus, folder: Path) -> Corpus:
    """The beginning of the first blocks of each split: `TOKENS` tokens of calibration, one block of the others."""
    found: list[TokenBlocks] = []
    for blocks in corpus.splits:
        length = min(BLOCK_TOKENS, blocks.block_tokens)
        count = min(blocks.num_blocks, -(-TOKENS // length) if blocks.split == "calibration" else 1)
        shape = (blocks.num_blocks, blocks.block_tokens)
        arrays = {
            name: values[:count, :length] if values.shape == shape else values
            for name, values in load_arrays(blocks.arrays).items()
        }
        saved = save_arrays(folder / f"{blocks.split}.safetensors", arrays)
        found.append(blocks.model_copy(update={"arrays": saved, "num_blocks": count, "block_tokens": length}))
    return corpus.model_copy(update={"splits": tuple(found)})


def slice_budget(model: Model, few: Model, build: Build, page_bytes: int) -> int:
    """Bytes of DRAM for the slice: what it must hold, and of the rest the share that its layers have in the build."""
    layers = few.spec.num_hidden_layers
    rest = build.dram_budget_bytes - least_bytes(model, build, page_bytes)
    return least_bytes(few, build, page_bytes) + max(0, rest) * layers // model.spec.num_hidden_layers


def least_bytes(model: HasShapes, build: Build, page_bytes: int) -> int:
    """DRAM without which nothing runs, whatever the sparsity: resident tensors, KV cache, bookkeeping and the smallest
    read buffer.

    With `auto` that of the candidate that needs the least.
    """

    def least_of(method: str) -> int:
        options = own_options(method, build.options) if build.method == AUTO else build.options
        families = families_for(method, options, model.spec)
        buffer = read_buffer_bytes(model.spec, build.format, families, 0, page_bytes)
        sections = make_sections(model.spec, families, build.format, build.layers_per_group)
        bookkeeping = bookkeeping_bytes(model.spec, sections, method, page_bytes)
        return resident_bytes(model, families, build.format) + bookkeeping + buffer

    methods = methods_for(build.method, model.spec.exact_zeros, model.spec.is_mixture)
    return min(map(least_of, methods)) + kv_cache_bytes(model.spec, build.context_length, build.kv_cache)


def _job(stage: str, build: Build, stages: Sequence[str], layers: int, budget: int, folder: Path) -> Job:
    """A stage as the workflow would run it, but for what the slice and the folder change."""
    fields = config_of(stage).model_fields
    changed = {"dram_budget": budget, "artifact": str(folder / f"{stage}.coldpress")}
    changed |= {"metrics": str(folder / "report.json"), "html": str(folder / "report.html")}
    changed |= {"file": str(folder / "exported"), "exported": (str(folder / "exported"),)}
    changed |= SHORTENED.get(stage, {})
    sources = {name: writer_of(stage, name, stages) for name in records_of(stage)} | (
        {"device": "device"} if "device" in records_of(stage) else {}
    )
    return Job(
        stage=stage,
        settings={**build.settings[stage], **{name: value for name, value in changed.items() if name in fields}},
        records={name: (folder / f"{source}.json",) for name, source in sources.items() if source},
        output=folder / f"{stage}.json",
        layers=tuple(range(layers)),
        threads=build.threads,
    )


def _stages(build: Build, spec: ModelSpec) -> list[str]:
    """What the build consists of."""
    left_out = set() if build.distill else {"distill"}
    if build.settings["relufy"]["activation"] == relufy.OFF:
        left_out.add("relufy")
    methods = methods_for(build.method, spec.exact_zeros, spec.is_mixture)
    if not any(load("coldpress.runtime.sparsity", Selector, method).NEEDS_PREDICTORS for method in methods):
        left_out |= {"predict", "size"}
    if not load("coldpress.compiler.stages.quantize", Algorithm, build.settings["quantize"]["algorithm"]).NEEDS_GRAM:
        left_out.add("gram")
    if not build.settings.get("importance"):
        left_out.add("importance")
    if "target" not in build.settings["export"]:
        left_out.add("export")
    return [stage for stage in STAGES if stage not in left_out]


def _try(job: Job) -> None:
    """Runs one stage; what it raises becomes a sentence that names it, and what nobody foresaw is logged whole."""
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
