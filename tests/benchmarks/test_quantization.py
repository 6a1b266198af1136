"""What `quantization` compares with: llama.cpp's types and codes, the noised reference, and the import of a file."""

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from gguf.quants import quantize as reference

from benchmarks.quantization import greedy_tokens, over_llama
from benchmarks.shared import ggml, imported, noised
from benchmarks.shared.llama_sizes import SIZES, type_of
from coldpress.compiler.activity import forward
from coldpress.compiler.activity.forward import LayerStream
from coldpress.schemas.model import ATTENTION_ROLES, MLP_ROLES
from tests.support.gguf_cases import exported, rewritten

ROLES = (*ATTENTION_ROLES, *MLP_ROLES)


def types(size: str, layers: int, hidden: int, inner: int) -> Counter[str]:
    widths = {role: inner if role == "down_proj" else hidden for role in ROLES}
    return Counter(type_of(size, role, layer, layers, widths[role]) for role in ROLES for layer in range(layers))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("Q3_K_M", {"Q3_K": 128, "Q4_K": 92, "Q5_K": 4}),
        ("Q4_K_M", {"Q4_K": 192, "Q6_K": 32}),
        ("Q5_K_M", {"Q5_K": 192, "Q6_K": 32}),
        ("Q6_K", {"Q6_K": 224}),
        ("Q8_0", {"Q8_0": 224}),
    ],
)
def test_types_are_those_of_the_files_of_a_7b(size: str, expected: dict[str, int]) -> None:
    """Counts that llama.cpp prints for files of Llama 2 7B, without embeddings (Q3_K, Q4_K, ...) and head (Q6_K)."""
    assert types(size, 32, 4096, 11008) == expected


@pytest.mark.parametrize("role", ["v_proj", "down_proj"])
def test_layers_with_more_bits_are_those_of_the_files_of_a_7b(role: str) -> None:
    more = {layer for layer in range(32) if type_of("Q4_K_M", role, layer, 32, 4096) == "Q6_K"}  # type: ignore[arg-type]
    assert more == {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}


def test_types_are_those_of_a_file_whose_rows_have_no_blocks_of_256() -> None:
    """Counts of Qwen2.5-Coder-0.5B-Instruct in Q4_K_M: v_proj and down_proj have more bits in half of 24 layers."""
    assert types("Q4_K_M", 24, 896, 4864) == {"Q5_0": 132, "Q8_0": 12, "Q6_K": 12, "Q4_K": 12}
    assert all(types(size, 24, 896, 4864).total() == 168 for size in SIZES)


def test_noise_is_at_most_half_a_step_of_its_group_and_only_in_layers(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    file = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    values = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in {"token_embd.weight": (8, 64), "blk.0.attn_q.weight": (8, 64), "blk.0.x_norm": (64,)}.items()
    }
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.attn_q.weight", reference(values["blk.0.attn_q.weight"], q8_0), raw_dtype=q8_0)
    writer.add_tensor("token_embd.weight", values["token_embd.weight"].astype(np.float16))
    writer.add_tensor("blk.0.x_norm", values["blk.0.x_norm"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    noised.write(file, tmp_path / "noised.gguf")
    reader = gguf.GGUFReader(tmp_path / "noised.gguf")
    tokens = reader.get_field("tokenizer.ggml.tokens")
    assert tokens is not None
    assert tokens.contents() == ["a", "b"]
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert {name: tensor.tensor_type.name for name, tensor in found.items()} == {
        "blk.0.attn_q.weight": "F16",
        "token_embd.weight": "F16",
        "blk.0.x_norm": "F32",
    }
    assert np.array_equal(found["token_embd.weight"].data, values["token_embd.weight"].astype(np.float16))
    assert np.array_equal(found["blk.0.x_norm"].data, values["blk.0.x_norm"])
    source = dequantize(reference(values["blk.0.attn_q.weight"], q8_0), q8_0).reshape(-1, 32)
    off = found["blk.0.attn_q.weight"].data.astype(np.float32).reshape(-1, 32) - source
    shares = off / np.ptp(source, axis=1, keepdims=True) * 15
    assert np.abs(shares).max() == pytest.approx(0.5, abs=0.01)
    assert shares.std() == pytest.approx(12**-0.5, abs=0.03)  # uniform
    noised.write(file, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "noised.gguf").read_bytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_llama_cpp_rounds_as_the_package_gguf_does_without_importances(kind: str) -> None:
    pytest.importorskip("xllamacpp")
    values = np.random.default_rng(0).standard_normal((6, 96)).astype(np.float32)
    assert np.array_equal(ggml.quantize(values, kind), reference(values, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", ["Q3_K", "Q4_K", "IQ4_NL"])
def test_llama_cpp_loses_less_where_an_input_is_important(kind: str) -> None:
    pytest.importorskip("xllamacpp")
    rng = np.random.default_rng(0)
    values, importance = rng.standard_normal((16, 512)).astype(np.float32), np.ones(512, np.float32)
    importance[::32] = 1000

    def lost(codes: np.ndarray) -> float:
        errors = dequantize(codes, gguf.GGMLQuantizationType[kind]) - values
        return float((np.square(errors) * importance).sum())

    assert lost(ggml.quantize(values, kind, importance)) < 0.7 * lost(ggml.quantize(values, kind))


def test_an_import_counts_the_matrices_whose_values_are_the_files_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    _, file = exported(tmp_path, "llama", sizes)

    def change(name: str, values: np.ndarray, kind: str) -> tuple[np.ndarray, str]:
        if values.ndim == 1:
            return values, kind
        own = "Q4_0" if "attn" in name else "Q5_1"
        return reference(values.astype(np.float32), gguf.GGMLQuantizationType[own]), own

    quantized = rewritten(file, tmp_path / "quantized.gguf", change)
    count = sum(len(tensor.shape) > 1 for tensor in gguf.GGUFReader(quantized).tensors)
    assert count in (15, 16)
    assert imported.imported(quantized, tmp_path / "kept") == (count, count)
    monkeypatch.setattr(imported, "own_layers", lambda model: "q4_1")
    equal, total = imported.imported(quantized, tmp_path / "rounded")
    assert total == count
    assert equal == count - 6  # the MLPs are rounded; all else keeps its codes, which are smaller


def test_the_likeliest_token_does_not_depend_on_how_the_head_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = exported(tmp_path, "llama", {"hidden_size": 64, "intermediate_size": 96})
    stream = LayerStream(model)
    tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, (3, 40))
    expected = stream.logits(tokens).argmax(axis=-1)
    monkeypatch.setattr(forward, "HEAD_ROWS", 100)
    assert np.array_equal(greedy_tokens(stream, stream.last_hidden(tokens)), expected)


def test_a_ratio_is_formed_within_a_model_and_a_size() -> None:
    kl = {("a", "llama"): 2.0, ("a", "mixed"): 1.0, ("b", "llama"): 4.0, ("b", "mixed"): 3.0, ("c", "mixed"): 9.0}
    rows = [{"model": model, "way": way, "size": "Q6_K", "kl": found} for (model, way), found in kl.items()]
    rows += [{"model": "a", "way": "import", "equal": 1, "total": 1}]
    assert over_llama(rows, "mixed") == {"Q6_K": {"median": 0.625, "worst": 0.75}}
    assert over_llama(rows, "gptq") == {}
