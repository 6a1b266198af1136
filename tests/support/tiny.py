"""Makes a tiny checkpoint, its device and its text without running any stage: the same bytes on every machine."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from coldpress.compiler.checkpoint.weight_files import source_file
from coldpress.compiler.io import save_arrays
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from coldpress.schemas.device import DeviceProfile, Figure, Flash, ReadPoint
from coldpress.schemas.families import resident_roles
from coldpress.schemas.model import Model, ModelSpec, SourceFile, TensorSource, role_shape
from tests.support.models import write_safetensors
from tests.support.shapes import small_spec


def hashed(label: str, *shape: int) -> np.ndarray:
    """Returns float32 values in [-1, 1), exact in fp16, that depend only on the label and the index."""
    start = int.from_bytes(hashlib.sha256(label.encode()).digest()[:4], "little")
    bits = np.arange(int(np.prod(shape)), dtype=np.uint64) * np.uint64(2654435761) + np.uint64(start)
    bits ^= bits >> np.uint64(15)
    bits = (bits * np.uint64(2246822519)) & np.uint64(0xFFFFFFFF)
    bits ^= bits >> np.uint64(13)
    return ((bits & np.uint64(0x7FF)).astype(np.float32) / np.float32(1024) - 1).reshape(shape)


def shuffled(label: str, count: int) -> np.ndarray:
    """Returns a permutation int32 [count] that depends only on the label and the count."""
    return np.argsort(hashed(label, count), kind="stable").astype(np.int32)


def tiny_spec(**changes: Any) -> ModelSpec:
    """Returns a Llama of two layers, 64 wide; its 72 neurons are no multiple of 32, so the last group is padded."""
    own: dict[str, Any] = {
        "vocab_size": 384,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_ids": (1,),
    }
    return small_spec(**(own | changes))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Returns role -> shape of every tensor of a model without biases."""
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
    """Writes weights and tokenizer into `folder`; `values` replace tensors by role (`__` stands for a dot)."""
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
    """Returns config.json for transformers."""
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
    """Returns tokenizer.json of a word-level tokenizer, written by hand so that no library's version changes it."""
    vocabulary = {f"w{word}": word for word in range(vocab_size)}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    return dict.fromkeys(parts) | {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }


def hf_name(role: str) -> str:
    """Returns Llama's name of a tensor in a checkpoint."""
    if role.startswith("lm_head"):
        return role
    for part, owner in (("q_", "self_attn"), ("k_", "self_attn"), ("v_", "self_attn"), ("o_", "self_attn")):
        role = role.replace(f".{part}proj", f".{owner}.{part}proj")
    for part in ("gate_proj", "up_proj", "down_proj"):
        role = role.replace(f".{part}", f".mlp.{part}")
    return f"model.{role}"


def describe(spec: ModelSpec, shapes: dict[str, tuple[int, ...]], file: Path) -> Model:
    """Returns the record of a model; `file` need not exist where only shapes matter."""
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
        private_files=tuple(map(source_file, sorted(file.parent.glob("*.json")))),
        license_files=tuple(map(source_file, sorted(file.parent.glob("LICENSE")))),
        weights_sha256=digest,
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
    )


def tiny_device(page_bytes: int = 4096, **changes: Any) -> DeviceProfile:
    """Returns a phone-like device with round figures."""

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
    """Writes a corpus of four blocks per split."""
    splits = []
    for split in SPLITS:
        tokens = ((hashed(split, 4, block_tokens) + 1) * vocab_size / 2).astype(np.int32)
        arrays = save_arrays(folder / f"{split}.safetensors", {"tokens": tokens})
        splits.append(TokenBlocks(split=split, arrays=arrays, num_blocks=4, block_tokens=block_tokens))
    return Corpus(name="tiny", text_sha256="0" * 64, splits=tuple(splits))
