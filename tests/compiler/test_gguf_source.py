"""ingest: a model in GGUF is what it was before it was exported, and hostile files end in a sentence."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from coldpress.compiler.activity.forward import choose_dtype
from coldpress.compiler.checkpoint import gguf_config, gguf_files, gguf_tokenizer
from coldpress.compiler.checkpoint.source_config import checked_config
from coldpress.compiler.checkpoint.tensors import (
    codes_type,
    read_codes,
    read_role,
    read_rows,
    read_stored,
    rotary_inv_freq,
    stored_dtype,
)
from coldpress.compiler.llama_cpp.formats import formats
from coldpress.compiler.rounding import rtn
from coldpress.compiler.rounding._matrix import choose_codes
from coldpress.compiler.rounding._weights import weights_of
from coldpress.schemas.errors import CheckpointError
from tests.support.checkpoints import refusal, run
from tests.support.gguf_cases import WITH_MORE, exported, rewritten
from tests.support.models import write_model

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 11, "num_experts_per_tok": 3, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "nemotron": ("nemotron", {}),
    "arcee": ("arcee", {}),
    "olmoe": ("olmoe", {"num_key_value_heads": 4}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
}


def near(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns their numbers where ours are the same as far as float32 goes."""
    numbers = {key: value for key, value in theirs.items() if isinstance(value, float)}
    return {key: value for key, value in numbers.items() if np.isclose(ours[key] or 0, value, rtol=1e-6)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLAIN, *WITH_MORE])
def test_a_model_comes_back_from_its_gguf(tmp_path, name):
    kind, overrides = (PLAIN | WITH_MORE)[name]
    model, file = exported(tmp_path, kind, overrides, 12 if name in WITH_MORE else 2)
    found = run(file, tmp_path / "g")
    ours, theirs = ({**one.spec.model_dump()} for one in (found, model))
    assert {**ours, **near(ours, theirs)} == theirs
    assert found.tensors.keys() == model.tensors.keys()
    for role in model.tensors:
        values = read_role(model, role)
        np.testing.assert_allclose(read_role(found, role), values, rtol=0, atol=2e-7 if "norm" in role else 0)
    for kind in model.spec.frequencies:
        np.testing.assert_allclose(rotary_inv_freq(found, kind), rotary_inv_freq(model, kind), rtol=1e-6)


def test_gpt_oss_comes_from_a_file_with_its_names(tmp_path):
    """It is never exported; the names are those of llama.cpp's converter (gguf-py/gguf/tensor_mapping.py)."""
    _, file = exported(tmp_path / "l", "llama", {}, layers=1)
    limit = {"swiglu_limit": 7.0}  # in no key of GGUF
    write_model(tmp_path / "m", "gpt_oss", num_hidden_layers=2, dtype="float16", overrides=limit)
    model = run(tmp_path / "m", tmp_path / "w")
    spec, plain_keys = model.spec, gguf.GGUFReader(file).fields
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gpt-oss")
    for name, field in plain_keys.items():
        if name.startswith("tokenizer."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if field.types[1:] else None)
    writer.add_block_count(2)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_expert_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(spec.num_key_value_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_expert_count(spec.num_experts)
    writer.add_expert_used_count(spec.num_experts_per_tok)
    writer.add_sliding_window(spec.sliding_window or 0)
    rope = json.loads((Path(model.folder) / "config.json").read_text())["rope_parameters"]
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
    names["router"] = "ffn_gate_inp"
    names |= {f"{part}_proj": f"attn_{part}" for part in "qkv"} | {"o_proj": "attn_output", "attention": "attn_sinks"}
    tensors = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
    tensors |= {"output.weight": "lm_head.weight"}
    for role in model.tensors:
        _, layer, module, *rest = (*role.split("."), "")[:4] if role.startswith("layers.") else ("", "", "", "")
        if module in names:
            kind = "weight" if rest[0] == "sinks" else rest[0]
            tensors[f"blk.{layer}.{names[module]}.{kind}"] = role
    for name, role in tensors.items():
        writer.add_tensor(name, read_role(model, role))
    for layer in range(2):
        for part in ("gate", "up", "down"):
            for kind in ("weight", "bias"):
                roles = [f"layers.{layer}.experts.{e}.{part}_proj.{kind}" for e in range(spec.num_experts)]
                values = np.stack([read_role(model, role) for role in roles])
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = run(tmp_path / "a.gguf", tmp_path / "g")
    ours, theirs = ({**one.spec.model_dump()} for one in (found, model))
    assert {**ours, **near(ours, theirs)} == theirs
    for role in model.tensors:
        np.testing.assert_array_equal(read_role(found, role), read_role(model, role))
    np.testing.assert_allclose(rotary_inv_freq(found), rotary_inv_freq(model), rtol=1e-6)


def test_half_precision_keeps_its_type_where_nothing_is_converted(tmp_path):
    model, file = exported(tmp_path, "llama", {})
    found = run(file, tmp_path / "g")
    assert stored_dtype(found, "layers.0.o_proj.weight") == "F16"
    assert stored_dtype(found, "layers.0.q_proj.weight") == "F32"  # its rows have another order in the file
    for role in ("layers.0.o_proj.weight", "layers.0.q_proj.weight", "layers.1.down_proj.weight"):
        values = read_role(model, role)
        kind = {"F16": np.float16, "F32": np.float32}[stored_dtype(found, role)]
        stored = np.empty(values.shape, kind)
        read_stored(found, role, stored.view(np.uint8).reshape(-1))
        np.testing.assert_array_equal(stored, values)
        np.testing.assert_array_equal(read_rows(found, role, 5, 23), values[5:23])


TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
WITHOUT_ENCODER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""The package gguf only decodes these: random codes with scales of a model's size stand for a matrix."""


def encoded(values: np.ndarray, kind: str, chance: np.random.Generator) -> np.ndarray:
    """Returns rows uint8 [..., bytes] of a type."""
    qtype = gguf.GGMLQuantizationType[kind]
    if kind not in WITHOUT_ENCODER:
        return np.ascontiguousarray(gguf.quants.quantize(values, qtype)).view(np.uint8)
    per_block, size = gguf.GGML_QUANT_SIZES[qtype]
    rows = chance.integers(0, 256, (*values.shape[:-1], values.shape[-1] // per_block, size), np.uint8)
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for start in at:
        rows[..., start : start + 2] = np.array([0.004], np.float16).view(np.uint8)
    return rows.reshape(*values.shape[:-1], -1)


@pytest.mark.parametrize("kind", [*TYPES, *WITHOUT_ENCODER])
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_every_type_is_decoded_as_the_package_gguf_does(tmp_path, kind, model_type, monkeypatch):
    """In rows that heads permute, in stacked experts, and for some rows of a matrix alone."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    _, file = exported(tmp_path, model_type, sizes | {"head_dim": 64, "sliding_window": None}, layers=1)
    chance, expected = np.random.default_rng(0), dict[str, np.ndarray]()

    def change(name: str, values: np.ndarray, _type: str) -> tuple[np.ndarray, str]:
        if values.ndim == 1 or "ffn_gate_inp" in name:
            return values, "F32"
        rows = encoded(np.ascontiguousarray(values, np.float32), kind, chance)
        expected[name] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(values.shape)
        return rows, kind

    found = run(rewritten(file, tmp_path / "b.gguf", change), tmp_path / "g")
    assert expected
    for role, name in (("o_proj", "attn_output"), ("q_proj", "attn_q"), ("k_proj", "attn_k")):
        values = expected[f"blk.0.{name}.weight"]
        if role != "o_proj":
            values = values.reshape(-1, 32, 2, 256).swapaxes(1, 2).reshape(values.shape)
        np.testing.assert_array_equal(read_role(found, f"layers.0.{role}.weight"), values)
        np.testing.assert_array_equal(read_rows(found, f"layers.0.{role}.weight", 33, 77), values[33:77])
    if model_type == "mixtral":
        for expert in (0, 3):
            values = expected["blk.0.ffn_down_exps.weight"][expert]
            np.testing.assert_array_equal(read_role(found, f"layers.0.experts.{expert}.down_proj.weight"), values)
    np.testing.assert_array_equal(read_role(found, "embed_tokens.weight"), expected["token_embd.weight"])
    kept = [role for role in found.tensors if role.endswith("_proj.weight") and codes_type(found, role) in formats()]
    assert bool(kept) == (kind in formats() and kind != "F16")
    for role in kept:  # a build keeps these codes
        rows = read_codes(found, role)
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(values, read_role(found, role))
        chosen = choose_codes(rtn.Plugin(), weights_of(found, role, "row"), role, formats()[kind])
        np.testing.assert_array_equal(chosen, rows)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    few_digits = kind not in ("F32", "F16") and model_type == "llama"  # Mixtral's routers are in float32
    assert choose_dtype(found, "cpu") == ("bfloat16" if few_digits else "float32")


def test_a_scale_that_is_not_finite_is_found(tmp_path):
    _, file = exported(tmp_path, "llama", {"hidden_size": 64}, layers=1)

    def change(name: str, values: np.ndarray, kind: str) -> tuple[np.ndarray, str]:
        if name != "blk.0.ffn_up.weight":
            return values, kind
        rows = encoded(np.ascontiguousarray(values, np.float32), "Q8_0", np.random.default_rng(0))
        rows[3, 34:36] = np.array([np.inf], np.float16).view(np.uint8)
        return rows, "Q8_0"

    text = refusal(rewritten(file, tmp_path / "b.gguf", change), tmp_path / "g")
    assert "tensor blk.0.ffn_up.weight holds 32 values that are NaN, infinite or beyond 65504" in text


def test_parts_of_a_split_model_are_one(tmp_path):
    model, file = exported(tmp_path, "llama", {})
    names = [tensor.name for tensor in gguf.GGUFReader(file).tensors]
    for number, held in enumerate((names[:5], names[5:])):
        keys = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        part = tmp_path / f"big-{number + 1:05d}-of-00002.gguf"
        rewritten(file, part, lambda name, values, kind, held=held: (values, kind) if name in held else None, **keys)
    for part in (1, 2):
        found = run(tmp_path / f"big-{part:05d}-of-00002.gguf", tmp_path / f"g{part}")
        assert found.name == "big"
        assert [entry.name for entry in found.files] == [f"big-{n:05d}-of-00002.gguf" for n in (1, 2)]
        for role in model.tensors:
            np.testing.assert_array_equal(read_role(found, role), read_role(model, role))
    shutil.copy(tmp_path / "big-00002-of-00002.gguf", tmp_path / "odd-00001-of-00002.gguf")
    assert "odd-00002-of-00002.gguf is missing beside" in refusal(tmp_path / "odd-00001-of-00002.gguf", tmp_path / "x")
    shutil.copy(tmp_path / "big-00001-of-00002.gguf", tmp_path / "odd-00002-of-00002.gguf")
    assert "it is part 1 of 2 by its keys, expected 0 of 2" in refusal(tmp_path / "odd-00001-of-00002.gguf", tmp_path)


LACKING = {
    "llama.block_count": "llama.block_count is missing, expected a whole number",
    "llama.attention.layer_norm_rms_epsilon": "llama.attention.layer_norm_rms_epsilon is missing",
    "tokenizer.ggml.model": "it has no tokenizer (tokenizer.ggml.model), expected one of gpt2, llama",
    "tokenizer.ggml.pre": "tokenizer.ggml.pre is None, so it is not known how to split texts, expected",
    "tokenizer.ggml.merges": "tokenizer.ggml.merges is None, expected a list of texts",
    "general.architecture": "general.architecture is None, expected a text",
}
WRONG = {
    "split.count": ("two", "it is part 0 of 'two' by its keys, expected 0 of 1 by its name"),
    "split.no": (np.zeros(3, np.int32), "by its keys, expected 0 of 1 by its name"),
    "general.architecture": ("mamba", "the architecture 'mamba' is not supported in GGUF; supported are arcee,"),
    "general.type": ("adapter", "it is GGUF of the type 'adapter', expected model"),
    "llama.block_count": (3, "the tensor blk.2.attn_q.weight is missing"),
    "llama.attention.head_count": (0, "it has 0 attention heads of an embedding of 64"),
    "llama.rope.dimension_count": (8, "8 of 16 dimensions of a head are rotated, expected all"),
    "llama.embedding_length": (128, "has the shape"),
    "llama.rope.scaling.type": ("su", "rope.scaling.type is 'su', expected none, linear, yarn or longrope"),
    "tokenizer.ggml.model": ("bert", "it has the tokenizer 'bert'"),
    "tokenizer.ggml.pre": ("unheard", "tokenizer.ggml.pre is 'unheard', so it is not known how to split texts"),
}


@pytest.mark.parametrize("key", [*LACKING, *(f"{key} wrong" for key in WRONG)])
def test_what_a_file_lacks_or_says_wrongly_is_named(tmp_path, plain, key):
    name, _, wrong = key.partition(" ")
    value, text = WRONG[name] if wrong else (None, LACKING[name])
    changed = rewritten(plain, tmp_path / "a.gguf", **{name: value})
    assert text in refusal(changed, tmp_path / "g")


def test_a_tensor_without_a_place_is_refused(tmp_path, plain):
    changed = rewritten(plain, tmp_path / "a.gguf", more={"blk.0.attn_q.bias": np.zeros(64, np.float32)})
    assert "blk.0.attn_k.bias is missing" in refusal(changed, tmp_path / "g")
    changed = rewritten(plain, tmp_path / "b.gguf", more={"blk.0.attn_q.scale": np.zeros(1, np.float32)})
    assert "the tensor 'blk.0.attn_q.scale' has no place in a model" in refusal(changed, tmp_path / "g")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("plain"), "llama", {})[1]


def test_a_hostile_file_ends_in_a_sentence(tmp_path, plain):
    """Every byte of the header is believed once: numbers at its front, lengths, types, offsets, texts."""
    data, chance, file = plain.read_bytes(), np.random.default_rng(0), tmp_path / "a.gguf"
    end = min(tensor.data_offset for tensor in gguf.GGUFReader(plain).tensors)
    front = [*range(4, 24), *chance.integers(24, end, 400).tolist()]
    ends = Counter[bool]()
    for place in front:
        changed = bytearray(data)
        width = int(chance.choice([1, 4, 8]))
        changed[place : place + width] = chance.choice([b"\xff", b"\x00", b"\x7f"]) * width
        file.write_bytes(changed[: int(chance.integers(place, len(data)))] if chance.random() < 0.1 else changed)
        said = understood(file)
        assert said is None or (said and "\n" not in said and len(said) < 2000)
        ends[said is None] += 1
    assert min(ends[True], ends[False]) > 50


def understood(file: Path) -> str | None:
    """Returns the sentence that a file ends in; None if it can be read."""
    try:
        model = gguf_files.open_gguf(file)
        gguf_tokenizer.tokenizer_of(model)
        checked_config(gguf_config.source_config_of(model))
    except CheckpointError as error:
        return str(error)
    return None


PROMISES = {
    "tensors": (8, "it promises 18446744073709551615 tensors"),
    "keys": (16, "keys, expected at most 262144 and 65536"),
    "a key's length": (24, "a text of 18446744073709551615 bytes is promised at byte 32"),
}


@pytest.mark.parametrize("name", PROMISES)
def test_a_promise_beyond_the_file_takes_no_memory(tmp_path, plain, name):
    place, text = PROMISES[name]
    data = bytearray(plain.read_bytes())
    data[place : place + 8] = b"\xff" * 8
    (tmp_path / "a.gguf").write_bytes(data)
    assert text in refusal(tmp_path / "a.gguf", tmp_path / "g")


def test_another_file_is_no_model(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x" * 100)
    assert "a.bin is a file and no GGUF, expected the folder of a checkpoint or GGUF" in refusal(
        tmp_path / "a.bin", tmp_path / "g"
    )
