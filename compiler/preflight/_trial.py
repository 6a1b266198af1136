"""The whole pipeline on a slice of the model, in one process: what would fail after hours fails after seconds.

The slice is the first layers with everything outside the layers, a few blocks of the corpus, and a DRAM budget that
leaves each layer what it will have in the real build. Stages run as their jobs do, from records through the command
line of compiler/job.py, so what is tried is the code that will run. Nothing of it is kept.
"""

import json
import logging
import math
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compiler._io import digest, load_arrays, save_arrays, save_record
from compiler.checkpoint.source_json import read_object
from compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from compiler.cost_model import buffers_for, kv_cache_bytes, resident_bytes
from compiler.job import STAGES, execute, parameters_of, record_of
from runtime._plugins import load, options_of
from schemas.base import Options
from schemas.corpus import Corpus, TokenBlocks
from schemas.device import DeviceProfile
from schemas.errors import ColdpressError
from schemas.families import FamilyName, FormatName, Method
from schemas.model import Model

LOG = logging.getLogger(__name__)
LAYERS = 2
TOKENS = 512
BLOCK_TOKENS = 64
"""Calibration tokens, enough for predictors to be trained, chosen and judged on; and how long a block is at most."""
WRITERS = {
    "corpus": "tokenize",
    "sparsity": "allocate",
    "placement": "place",
    "quantized": "quantize",
    "predictors": "predict",
    "verification": "verify",
}
"""Parameters of `run` that are not called like the stage whose record they take."""
SHORTENED = {
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
class Settings:
    """What the build will be made with."""

    method: Method
    format: FormatName
    density: float | None
    dram_budget_bytes: int
    context_length: int
    cache: str
    order: str
    place: str
    distill: bool
    threads: int
    options: Options = field(default_factory=dict)


def run(settings: Settings, model: Model, corpus: Corpus, device: DeviceProfile, folder: Path) -> int:
    """Runs all stages on a slice; gives its number of layers.

    Args:
        settings: Of the build.
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
        budget = slice_budget(model, few, settings, device.flash.page_bytes.value)
        for stage in _stages(settings):
            _try(stage, _arguments(stage, settings, few.spec.num_hidden_layers, budget, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    LOG.info("preflight: all stages ran on %d layers in %.0f s", LAYERS, time.monotonic() - started)
    return few.spec.num_hidden_layers


def slice_model(model: Model, folder: Path) -> Model:
    """The model's first `LAYERS` layers, with a configuration of its own in `folder`; weights stay where they are."""
    layers = min(LAYERS, model.spec.num_hidden_layers)
    shutil.copytree(model.folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
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


def slice_budget(model: Model, few: Model, settings: Settings, page_bytes: int) -> int:
    """Bytes of DRAM for the slice: what it must hold, and of the rest the share that its layers have in the build."""
    layers = few.spec.num_hidden_layers
    rest = settings.dram_budget_bytes - least_bytes(model, settings, page_bytes)
    return least_bytes(few, settings, page_bytes) + max(0, rest) * layers // model.spec.num_hidden_layers


def least_bytes(model: Model, settings: Settings, page_bytes: int) -> int:
    """DRAM without which nothing runs, whatever the sparsity: resident tensors, KV cache and the smallest buffers."""
    selector = load("runtime.sparsity", settings.method)
    families = selector.families(model.spec, options_of(selector, settings.options))
    whole: dict[FamilyName, tuple[float, ...]] = dict.fromkeys(families, (1.0,) * model.spec.num_hidden_layers)
    buffers = buffers_for(model.spec, settings.format, whole, 0, page_bytes).total_bytes
    kv_cache = kv_cache_bytes(model.spec, settings.context_length)
    return resident_bytes(model, families, settings.format) + kv_cache + buffers


def _arguments(stage: str, settings: Settings, layers: int, budget: int, folder: Path) -> list[str]:
    """A stage's command line, read off its `run` as compiler/job.py does."""
    values = {**asdict(settings), "heuristic": settings.order, "solver": settings.place, "dram_budget": budget}
    values |= {"artifact": folder / f"{stage}.coldpress", "metrics": folder / "report.json"}
    values |= {"html": folder / "report.html", **SHORTENED.get(stage, {})}
    parameters = parameters_of(stage)
    known = [(name, values.get(name)) for name in parameters["config"].model_fields]
    found = [text for name, value in known if value is not None for text in (_flag(name), _text(value))]
    for name, hint in parameters.items():
        source = None if name == "config" or record_of(hint) is None else _source(stage, name, settings)
        if source and (folder / f"{source}.json").exists():
            found += [_flag(name), str(folder / f"{source}.json")]
    if "layers" in parameters:
        found += ["--layers", *map(str, range(layers))]
    if "threads" in parameters:
        found += ["--threads", str(settings.threads)]
    return [*found, "--output", str(folder / f"{stage}.json")]


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _source(stage: str, parameter: str, settings: Settings) -> str:
    """The stage whose record goes to a parameter of `stage`."""
    if parameter == "model":
        early = stage in ("calibrate", "allocate", "distill") or not settings.distill
        return "ingest" if early else "distill"
    if parameter == "activations":
        return "calibrate" if stage in ("allocate", "recalibrate") else "recalibrate"
    return WRITERS.get(parameter, parameter)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _stages(settings: Settings) -> list[str]:
    """What the build consists of, after `preflight`."""
    left_out = set() if settings.distill else {"distill"}
    if not load("runtime.sparsity", settings.method).NEEDS_PREDICTORS:
        left_out.add("predict")
    return [stage for stage in STAGES[STAGES.index("preflight") + 1 :] if stage not in left_out]


def _try(stage: str, arguments: list[str]) -> None:
    """Runs one stage; what it raises becomes a sentence that names it, and what nobody foresaw is logged whole."""
    try:
        execute(stage, arguments)
    except ColdpressError as error:
        raise ColdpressError(f"in a trial run on {LAYERS} layers, {stage} refused: {error}") from error
    except (Exception, SystemExit) as error:  # the command line's own refusal is a SystemExit
        LOG.exception("preflight: %s failed", stage)
        raise ColdpressError(
            f"in a trial run on {LAYERS} layers, {stage} failed with {type(error).__name__}: {error}; the whole build "
            "would fail there, too"
        ) from error
