"""Records of a whole build for a tiny model, made with numpy alone: what the last stages are tested on.

Weights come from integer hashing, not from a random generator, so that the same arguments give the same bytes with any
version of numpy; golden digests rest on that.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compiler import layout as layout_stage
from compiler._io import Workspace, save_arrays
from compiler.cost_model import kv_cache_bytes, predictor_bytes, resident_bytes
from compiler.package import PackageConfig, make_manifest
from compiler.package import run as run_package
from compiler.package._documents import Inputs
from compiler.package._hashing import Written
from compiler.package._joined import Codes
from compiler.quantize import QuantizeConfig
from compiler.quantize import run as run_quantize
from compiler.quantize._resident import layer_resident, shared_resident
from runtime._plugins import load
from schemas.activations import Activations, FamilyStatistics, LayerStatistics
from schemas.base import ArrayFile
from schemas.corpus import SPLITS, Corpus, TokenBlocks
from schemas.device import DeviceProfile, Figure, Flash, ReadPoint
from schemas.families import FormatName, Method, families_of, num_units, resident_roles
from schemas.layout import Layout
from schemas.manifest import (
    FLASH_FILE,
    PREDICTORS_FILE,
    RESIDENT_FILE,
    TABLES_FILE,
    ArtifactFile,
    Manifest,
)
from schemas.metrics import DenseRun, RunMetrics, Verification
from schemas.model import Model, ModelSpec, SourceFile, TensorSource, role_shape
from schemas.order import FamilyOrder, Order
from schemas.package import Package
from schemas.placement import LayerPlacement, Placement
from schemas.predictors import LayerPredictor, Predictors
from schemas.quantized import LayerCodes, Quantized
from schemas.sparsity import Budget, Densities, Sparsity
from tests.support.models import write_safetensors

TIERS = ("flash", "dram")


def hashed(label: str, *shape: int) -> np.ndarray:
    """float32 values in [-1, 1), exact in fp16, a function of the label and the index alone."""
    start = int.from_bytes(hashlib.sha256(label.encode()).digest()[:4], "little")
    bits = np.arange(int(np.prod(shape)), dtype=np.uint64) * np.uint64(2654435761) + np.uint64(start)
    bits ^= bits >> np.uint64(15)
    bits = (bits * np.uint64(2246822519)) & np.uint64(0xFFFFFFFF)
    bits ^= bits >> np.uint64(13)
    return ((bits & np.uint64(0x7FF)).astype(np.float32) / np.float32(1024) - 1).reshape(shape)


def shuffled(label: str, count: int) -> np.ndarray:
    """A permutation int32 [count], a function of the label alone."""
    return np.argsort(hashed(label, count), kind="stable").astype(np.int32)


def tiny_spec(**changes: Any) -> ModelSpec:
    """A Llama of two layers, 64 wide; 96 and 72 are no multiples of 32, so the last groups are padded."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "hidden_act": "relu",
        "gated_mlp": True,
        "norm": "rms_norm",
        "norm_eps": 1e-5,
        "position": "rotary",
        "rotary_dim": 16,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_ids": (1,),
    }
    return ModelSpec(**(values | changes))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Role -> shape of every tensor of a model without biases."""
    hidden = spec.hidden_size
    roles = [f"{role}.weight" for role in resident_roles((), spec)]
    layer = {
        role: role_shape(spec, role) for role in ("input_layernorm.weight", "post_attention_layernorm.weight", *roles)
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (spec.vocab_size, hidden), "norm.weight": (hidden,)}
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.num_hidden_layers):
        shapes |= {f"layers.{index}.{role}": shape for role, shape in layer.items()}
    return shapes


def tiny_model(folder: Path, spec: ModelSpec | None = None, scale: float = 0.25, **values: np.ndarray) -> Model:
    """Writes weights and tokenizer into `folder`; `values` replaces tensors by role (dots written as `__`)."""
    spec = spec or tiny_spec()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {role: hashed(role, *shape) * np.float32(scale) for role, shape in tensor_shapes(spec).items()}
    tensors |= {role: np.abs(array) + 1 for role, array in tensors.items() if role.endswith("norm.weight")}
    tensors |= {role.replace("__", "."): np.asarray(array, np.float32) for role, array in values.items()}
    file = folder / "model.safetensors"
    write_safetensors(file, {hf_name(role): ("F32", array.shape, array.tobytes()) for role, array in tensors.items()})
    (folder / "config.json").write_text(json.dumps(llama_config(spec), indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer(spec.vocab_size), indent=1))
    (folder / "LICENSE").write_text("Do with it what you like.\n")
    return describe(spec, {role: array.shape for role, array in tensors.items()}, file)


def llama_config(spec: ModelSpec) -> dict[str, Any]:
    """config.json for transformers."""
    same = (
        "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim max_position_embeddings hidden_act tie_word_embeddings bos_token_id"
    )
    return {name: getattr(spec, name) for name in same.split()} | {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": spec.norm_eps,
        "eos_token_id": list(spec.eos_token_ids),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
    }


def word_tokenizer(vocab_size: int) -> dict[str, Any]:
    """tokenizer.json of a word-level tokenizer, written by hand: no version of a library changes it."""
    vocabulary = {f"w{word}": word for word in range(vocab_size)}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    return dict.fromkeys(parts) | {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }


def hf_name(role: str) -> str:
    """Llama's name of a tensor in a checkpoint."""
    if role.startswith("lm_head"):
        return role
    for part, owner in (("q_", "self_attn"), ("k_", "self_attn"), ("v_", "self_attn"), ("o_", "self_attn")):
        role = role.replace(f".{part}proj", f".{owner}.{part}proj")
    for part in ("gate_proj", "up_proj", "down_proj"):
        role = role.replace(f".{part}", f".mlp.{part}")
    return f"model.{role}"


def describe(spec: ModelSpec, shapes: dict[str, tuple[int, ...]], file: Path) -> Model:
    """The record of a model; `file` need not exist where only shapes matter."""
    data = file.read_bytes() if file.exists() else b""
    digest = hashlib.sha256(data).hexdigest()
    return Model(
        spec=spec,
        name="tiny",
        source="local",
        revision=None,
        license="MIT",
        folder=str(file.parent),
        tensors={
            role: TensorSource(file=str(file), tensor=hf_name(role), row_start=0, row_stop=shape[0], shape=shape)
            for role, shape in shapes.items()
        },
        files=(SourceFile(name=file.name, size_bytes=len(data), sha256=digest),),
        license_files=tuple(map(_source_file, sorted(file.parent.glob("LICENSE")))),
        weights_sha256=digest,
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
    )


def _source_file(path: Path) -> SourceFile:
    data = path.read_bytes()
    return SourceFile(name=path.name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def tiny_device(page_bytes: int = 4096, **changes: Any) -> DeviceProfile:
    """A phone-like device with round figures."""

    def figure(value: Any) -> Figure:
        return Figure(value=value, source="assumption: test")

    flash = Flash(
        page_bytes=figure(page_bytes),
        queue_depth=figure(32),
        latency_s=figure(1e-4),
        read_curve=figure(
            (
                ReadPoint(read_bytes=4096, bytes_per_s=4.096e8),
                ReadPoint(read_bytes=1 << 20, bytes_per_s=2.0e9),
            )
        ),
    )
    values: dict[str, Any] = {
        "name": "tiny-phone",
        "title": "Tiny phone",
        "dram_bytes": figure(8 << 30),
        "dram_budget_bytes": figure(4 << 30),
        "dram_bytes_per_s": figure(2e10),
        "num_cores": figure(4),
        "flash": flash,
    }
    return DeviceProfile(**(values | changes))


def tiny_corpus(folder: Path, vocab_size: int = 384, block_tokens: int = 32) -> Corpus:
    """Four blocks per split."""
    splits = []
    for split in SPLITS:
        tokens = ((hashed(split, 4, block_tokens) + 1) * vocab_size / 2).astype(np.int32)
        arrays = save_arrays(folder / f"{split}.safetensors", {"tokens": tokens})
        splits.append(TokenBlocks(split=split, arrays=arrays, num_blocks=4, block_tokens=block_tokens))
    return Corpus(name="tiny", text_sha256="0" * 64, splits=tuple(splits))


def tiny_sparsity(
    model: Model,
    method: Method = "topk",
    format_name: FormatName = "int8_group32",
    budget_share: float = 0.5,
    density: float = 0.25,
    rank: int = 8,
    context_length: int = 64,
    predictor_format: FormatName = "int8_group32",
    whole_layers: tuple[int, ...] = (),
) -> Sparsity:
    """Everything resident fits; `budget_share` of the units' bytes are left for buffers and cache.

    In `whole_layers` every unit is used, so that there is nothing to predict.
    """
    spec, families = model.spec, families_of(method, model.spec)
    layers = range(spec.num_hidden_layers)
    ranks = tuple(0 if layer in whole_layers else rank for layer in layers) if method == "predictor" else ()
    per_layer = tuple(1.0 if method == "dense" or layer in whole_layers else density for layer in layers)
    resident = resident_bytes(model, families, format_name)
    kv_cache = kv_cache_bytes(spec, context_length)
    predictors = sum(predictor_bytes(spec, size, predictor_format) for size in ranks)
    cache = int(budget_share * spec.num_hidden_layers * spec.intermediate_size * spec.hidden_size * 3) + 40_000
    return Sparsity(
        method=method,
        format=format_name,
        context_length=context_length,
        densities=tuple(Densities(family=family, per_layer=per_layer) for family in families),
        predictor_rank=ranks,
        predictor_format=predictor_format if ranks else None,
        budget=Budget(
            dram_budget_bytes=resident + kv_cache + predictors + cache,
            resident_bytes=resident,
            predictor_bytes=predictors,
            kv_cache_bytes=kv_cache,
            buffer_bytes=0,
            cache_bytes=cache,
        ),
    )


def tiny_placement(folder: Path, model: Model, sparsity: Sparsity, num_pinned: int = 3) -> Placement:
    """Pins `num_pinned` units of every family and layer."""
    arrays: dict[str, np.ndarray] = {}
    layers: list[LayerPlacement] = []
    for layer in range(model.spec.num_hidden_layers):
        for family in families_of(sparsity.method, model.spec):
            tiers = np.zeros(num_units(family, model.spec), np.int8)
            tiers[shuffled(f"pinned {layer} {family}", tiers.size)[:num_pinned]] = 1
            arrays[f"{layer}.{family}"] = tiers
            layers.append(LayerPlacement(layer=layer, family=family, num_pinned=num_pinned, min_pinned=1))
    return Placement(
        solver="test",
        tiers=TIERS,
        layers=tuple(layers),
        arrays=save_arrays(folder / "placement.safetensors", arrays),
        objective=1.0,
        gap=0.0,
        pinned_bytes=0,
    )


def tiny_order(folder: Path, model: Model, sparsity: Sparsity, layers: tuple[int, ...] | None = None) -> Order:
    """A shuffled order of every section."""
    entries: list[FamilyOrder] = []
    for layer in range(model.spec.num_hidden_layers) if layers is None else layers:
        for family in families_of(sparsity.method, model.spec):
            order = shuffled(f"order {layer} {family}", num_units(family, model.spec))
            arrays = save_arrays(folder / f"order-{layer}-{family}.safetensors", {"order": order})
            entries.append(
                FamilyOrder(layer=layer, family=family, heuristic="test", arrays=arrays, adjacent_coactivation=0.5)
            )
    return Order(entries=tuple(entries))


def tiny_predictors(folder: Path, model: Model, sparsity: Sparsity) -> Predictors:
    """Predictors of hashed numbers, where a layer gets one."""
    layers: list[LayerPredictor] = []
    if sparsity.predictor_format is None:
        return Predictors(weights_sha256=model.weights_sha256, layers=())
    plugin = load("runtime.quantization", sparsity.predictor_format)
    for layer, rank in ((layer, rank) for layer, rank in enumerate(sparsity.predictor_rank) if rank):
        arrays = {
            "fc1": plugin.encode(hashed(f"fc1 {layer}", rank, model.spec.hidden_size)),
            "fc2": plugin.encode(hashed(f"fc2 {layer}", model.spec.intermediate_size, rank)),
        }
        layers.append(
            LayerPredictor(
                layer=layer,
                rank=rank,
                format=sparsity.predictor_format,
                threshold=0.25,
                arrays=save_arrays(folder / f"predictor-{layer}.safetensors", arrays),
                recall=0.9,
                precision=0.6,
                predicted_density=0.3,
            )
        )
    return Predictors(weights_sha256=model.weights_sha256, layers=tuple(layers))


def tiny_activations(folder: Path, model: Model, sparsity: Sparsity, num_tokens: int = 50) -> Activations:
    """Bits that follow a power law, in every family; unit i and i + 1 are active together more often than others."""
    layers: list[LayerStatistics] = []
    for layer in range(model.spec.num_hidden_layers):
        families: list[FamilyStatistics] = []
        for family in families_of(sparsity.method, model.spec):
            count = num_units(family, model.spec)
            often = 0.9 / (1 + shuffled(f"hot {layer} {family}", count)) ** 0.5
            chance = (hashed(f"chance {layer} {family}", count, num_tokens) + 1) / 2
            active = chance < often[:, None]
            contexts = active.reshape(count, 5, -1).sum(axis=2).T
            arrays = {
                "bits": np.packbits(active, axis=1, bitorder="little"),
                "counts": active.sum(axis=1).astype(np.int64),
                "context_counts": contexts.astype(np.uint16),
                "task_counts": np.stack([contexts[:2].sum(axis=0), contexts[2:].sum(axis=0)]).astype(np.int64),
            }
            saved = save_arrays(folder / f"activations-{layer}-{family}.safetensors", arrays)
            families.append(
                FamilyStatistics(family=family, num_units=count, density=float(active.mean()), arrays=saved)
            )
        inputs = hashed(f"inputs {layer}", num_tokens, model.spec.hidden_size).astype(np.float16)
        saved = save_arrays(folder / f"inputs-{layer}.safetensors", {"mlp_inputs": inputs})
        similarity = None if layer == 0 else 0.8
        layers.append(LayerStatistics(layer=layer, families=tuple(families), inputs=saved, input_similarity=similarity))
    return Activations(num_tokens=num_tokens, exact_zeros=True, layers=tuple(layers))


def tiny_verification(layout: Layout, artifact_sha256: str) -> Verification:
    """Round figures of a run of 100 tokens."""
    run = RunMetrics(
        num_tokens=100,
        hits=6000,
        misses=2000,
        evictions=1500,
        reads=500,
        read_bytes=4_096_000,
        used_bytes=400_000,
        active_bytes=1_600_000,
        modelled_flash_s=0.015,
        modelled_dram_s=0.005,
        flash_s=0.02,
        decode_s=0.5,
        prefill_reads=8,
        prefill_read_bytes=300_000,
        prefill_s=0.01,
        first_token_s=0.1,
        dram_budget_bytes=layout.plans[0].dram_budget_bytes,
        dram_used_bytes=layout.plans[0].dram_budget_bytes - 100,
        peak_rss_bytes=80_000_000,
        extents_sha256="e" * 64,
        direct_io=True,
    )
    return Verification(
        artifact_sha256=artifact_sha256,
        num_test_tokens=100,
        ppl_source=8.0,
        ppl_artifact=8.2,
        ppl_dense=8.1,
        dense=DenseRun(
            reads_per_token=24,
            flash_bytes_per_token=98_304,
            flash_s=0.0002,
            dram_s=0.00005,
            read_buffer_bytes=8192,
            pinned_bytes=4080,
        ),
        max_logit_error=1e-3,
        top1_agreement=0.95,
        simulated_equals_real=True,
        run=run,
    )


@dataclass
class Build:
    """A build from weights to a packaged artifact, with each stage's record; changes go into `settings`."""

    folder: Path
    method: Method = "topk"
    format_name: FormatName = "int8_group32"
    cache: str = "lru"
    layers_per_job: int = 2
    num_pinned: int = 3
    page_bytes: int = 4096
    spec: ModelSpec = field(default_factory=tiny_spec)
    budget_share: float = 0.5
    source: Model | None = None
    """A model from elsewhere, in place of a tiny one of shape `spec`."""
    predictor_format: FormatName = "int8_group32"
    whole_layers: tuple[int, ...] = ()
    """Layers all of whose units are used."""
    name: str = "tiny.coldpress"

    def __post_init__(self) -> None:
        """Makes every record but the package."""
        records = self.folder / "records"
        self.model = self.source or tiny_model(self.folder / "model", self.spec)
        self.spec = self.model.spec
        self.device = tiny_device(self.page_bytes)
        self.corpus = tiny_corpus(records, self.spec.vocab_size)
        self.sparsity = tiny_sparsity(
            self.model,
            self.method,
            self.format_name,
            self.budget_share,
            predictor_format=self.predictor_format,
            whole_layers=self.whole_layers,
        )
        self.placement = tiny_placement(records, self.model, self.sparsity, self.num_pinned)
        self.predictors = tiny_predictors(records, self.model, self.sparsity)
        self.quantized = tuple(self._quantize(chunk) for chunk in self.chunks())
        self.order = tuple(tiny_order(records, self.model, self.sparsity, chunk) for chunk in self.chunks())
        self.layout = self._layout()

    def chunks(self) -> list[tuple[int, ...]]:
        """Layer numbers of each job."""
        layers, step = tuple(range(self.spec.num_hidden_layers)), self.layers_per_job
        return [layers[start : start + step] for start in range(0, len(layers), step)]

    def _quantize(self, layers: tuple[int, ...]) -> Quantized:
        work = Workspace(self.folder / "records" / f"quantized-{layers[0]:03d}", "fingerprint")
        return run_quantize(QuantizeConfig(), self.model, self.sparsity, layers, work)

    def _layout(self) -> Layout:
        config = layout_stage.LayoutConfig(cache=self.cache)
        predictors = (self.predictors,) if self.method == "predictor" else None
        return layout_stage.run(config, self.model, self.sparsity, self.placement, self.order, self.device, predictors)

    @property
    def artifact(self) -> Path:
        """Where `package` writes."""
        return self.folder / self.name

    def package(self, **changes: Any) -> Package:
        """Writes the artifact; `changes` replaces records. The record stays in `record`."""
        records: dict[str, Any] = {
            "model": self.model,
            "corpus": self.corpus,
            "sparsity": self.sparsity,
            "device": self.device,
            "layout": self.layout,
            "order": self.order,
            "placement": self.placement,
            "quantized": self.quantized,
            "predictors": (self.predictors,) if self.method == "predictor" else None,
        }
        self.record = run_package(PackageConfig(artifact=str(self.artifact)), **(records | changes))
        return self.record


def contents(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file below `folder`."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def manifest_of(
    model: Model,
    sparsity: Sparsity,
    placement: Placement,
    device: DeviceProfile,
    layout: Layout,
    predictors: tuple[LayerPredictor, ...] = (),
) -> Manifest:
    """The manifest that `package` would write around a layout, without writing anything: for the reader's rules."""
    nowhere = ArrayFile(array_file="", sha256="0" * 64)
    families = families_of(sparsity.method, model.spec)
    layers = tuple(
        LayerCodes(layer=layer, arrays=nowhere, resident=layer_resident(model, layer, families, sparsity.format))
        for layer in range(model.spec.num_hidden_layers)
    )
    codes = Codes("rtn", layers, nowhere, shared_resident(model, sparsity.format))
    corpus = Corpus(name="tiny", text_sha256="0" * 64, splits=())
    inputs = Inputs(model, corpus, sparsity, device, layout, (), placement, codes, predictors)
    written = Written(Path("nowhere"))
    sizes = {FLASH_FILE: layout.flash_bytes, RESIDENT_FILE: 1, TABLES_FILE: 1} | (
        {PREDICTORS_FILE: 1} if predictors else {}
    )
    written.files = [ArtifactFile(path=name, size_bytes=size, sha256="0" * 64) for name, size in sizes.items()]
    return make_manifest(inputs, written, {})
