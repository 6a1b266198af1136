"""GGUF files of tiny models, as `export` writes them, and with changes; models with more than Llama's arithmetic."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np

from coldpress.compiler.checkpoint.tensors import read_role, rotary_inv_freq
from coldpress.compiler.llama_cpp.formats import formats
from coldpress.compiler.stages import export
from coldpress.compiler.stages.export import ExportConfig
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.model import Model
from coldpress.schemas.package import Package
from tests.support.artifacts import Recipe, build_artifact, change_manifest
from tests.support.checkpoints import run
from tests.support.models import write_model
from tests.support.records import PROVENANCE

LATENTS = {"rms_norm_eps": 1e-6}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
WITH_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", {"attention_bias": True}),
    "granite plain": ("granite", {"attention_multiplier": 0.25, "embedding_multiplier": 1.0}),
    "granitemoe": ("granitemoe", {"num_local_experts": 11, "num_experts_per_tok": 3}),
    "granitemoe biases": (
        "granitemoe",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "smollm3": ("smollm3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "tie_word_embeddings": True, "attn_logit_softcapping": 4.0}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 32}),
    "gemma3 every third": ("gemma3_text", {"query_pre_attn_scalar": 32, "sliding_window_pattern": 3}),
    "phi": ("phi", {"hidden_act": "gelu_new"}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "falcon": ("falcon", {"tie_word_embeddings": True}),
    "falcon new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
    "glm4": ("glm4", {}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3 longrope": (
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.5, 1.0, 2.5, 4.0],
                "long_factor": [2.0, 3.0, 5.0, 9.0],
            },
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "n_routed_experts": 11, "num_experts_per_tok": 3},
    ),
    "glm4_moe groups": (
        "glm4_moe",
        {
            "first_k_dense_replace": 3,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v2": ("deepseek_v2", LATENTS),
    "deepseek_v2 latents of queries": (
        "deepseek_v2",
        LATENTS
        | {
            "q_lora_rank": 32,
            "n_routed_experts": 11,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2 other factors": (
        "deepseek_v2",
        LATENTS
        | {
            "first_k_dense_replace": 0,
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 64, "rope_theta": 50000.0, "mscale": 1.5, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek_v2 no factor for all": ("deepseek_v2", LATENTS | {"rope_parameters": YARN | {"factor": 4.0}}),
    "deepseek_v2 linear": (
        "deepseek_v2",
        LATENTS | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
}


def exported(folder: Path, kind: str, overrides: dict[str, Any], layers: int = 2, **options: Any) -> tuple[Model, Path]:
    """Returns a model of transformers', and the GGUF file that `export` makes of it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "m", kind, num_hidden_layers=layers, dtype="float16", overrides=overrides)
    model = run(folder / "m", folder / "w")
    roles = {role: read_role(model, role) for role in model.tensors}
    roles |= {role: rotary_inv_freq(model, kind) for kind, role in model.spec.frequencies.items()}
    built = build_artifact(folder / "a", Recipe(model.spec, method="dense"), roles)
    shutil.copytree(
        folder / "m", built.path / "tokenizer", ignore=lambda _, names: [n for n in names if "tok" not in n]
    )
    change_manifest(built.path, lambda manifest: None, relist=True)
    sha256 = Session(built.path).artifact.sha256
    sizes = {"artifact_bytes": 1, "flash_bytes": 1, "resident_bytes": 1, "predictor_bytes": 0}
    package = Package(folder=str(built.path), manifest_sha256=sha256, provenance=PROVENANCE, **sizes)
    export.run(ExportConfig(export="gguf", options=options, file=str(folder / "a.gguf")), package)
    return model, folder / "a.gguf"


def with_vocabulary(file: Path, to: Path, tokens: list[str], types: list[int], **keys: Any) -> Path:
    """Writes a GGUF file again with other tokens, whose embeddings are random; `keys` are of the tokenizer."""
    vocabulary = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    vocabulary |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(types, np.int32)}

    def change(name: str, values: np.ndarray, kind: str) -> tuple[np.ndarray, str]:
        if name not in ("token_embd.weight", "output.weight"):
            return values, kind
        table = np.random.default_rng(0).standard_normal((len(tokens), values.shape[1])) / 8
        return table.astype(np.float16), "F16"

    return rewritten(file, to, change, **vocabulary)


def _kinds(value: Any) -> list[Any]:
    """Returns GGUF's type of a value; of a list, also that of its entries."""
    if isinstance(value, list):
        return [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]
    if isinstance(value, np.ndarray):
        return [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[value.dtype.name.upper()]]
    kinds = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32"}
    return [gguf.GGUFValueType[kinds[type(value)]] if value is not None else None]


Change = Callable[[str, np.ndarray, str], tuple[np.ndarray, str] | None]
"""(name, values float32 or rows as stored, type) of a tensor -> rows and type to write; None leaves it out."""


def rewritten(
    file: Path,
    to: Path,
    change: Change = lambda name, values, kind: (values, kind),
    more: Mapping[str, np.ndarray] = MappingProxyType({}),
    **keys: Any,
) -> Path:
    """Writes a GGUF file again: with other values of keys (None leaves one out), and changed or further tensors."""
    reader = gguf.GGUFReader(file)
    values = {name: (field.contents(), field.types) for name, field in reader.fields.items() if "GGUF." not in name}
    writer = gguf.GGUFWriter(to, values["general.architecture"][0], use_temp_file=True)  # holds one tensor
    writer.kv_data[0].clear()  # it has written the architecture
    for name, value in keys.items():
        values[name] = value, _kinds(value)
    for name, (value, kinds) in values.items():
        if value is not None and not (isinstance(value, list) and not value):
            value = value.tolist() if isinstance(value, np.ndarray) else value
            writer.add_key_value(name, value, kinds[0], kinds[1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        found = change(tensor.name, np.asarray(tensor.data), tensor.tensor_type.name)
        if found is not None:
            writer.add_tensor(tensor.name, found[0], raw_dtype=gguf.GGMLQuantizationType[found[1]])
    for name, array in more.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def quantized(file: Path, to: Path, type_of: Callable[[str], str]) -> Path:
    """Writes a GGUF file again with its matrices in the types of their names; vectors and routers stay in float32."""

    def change(name: str, values: np.ndarray, _type: str) -> tuple[np.ndarray, str]:
        if values.ndim == 1 or "ffn_gate_inp" in name:
            return values, "F32"
        found = type_of(name)
        codec = load("coldpress.runtime.quantization", Format, formats()[found])
        rows = codec.encode(np.ascontiguousarray(values.reshape(-1, values.shape[-1]), np.float32))
        return rows.reshape(*values.shape[:-1], -1), found

    return rewritten(file, to, change)
