"""ingest: the one sentence that each checkpoint gets whose headers, tensors or shards are bad."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import INDEX, WEIGHTS, edit, edit_config, edit_header, refusal, rewrite, run
from tests.support.models import DTYPES, encode, random_weights, write_safetensors

# --- headers


def set_offsets(name: str, start: int, stop: int) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(data_offsets=[start, stop])


NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda header: header[NORM].update(dtype="F4"), f"tensor {NORM}.dtype is 'F4', expected one of BOOL"),
        (lambda header: header[NORM].update(dtype="I32"), f"tensor {NORM} has the unsupported dtype I32, expected F32"),
        (lambda header: header[NORM].update(shape=[63]), "expected 252 bytes apart for F32 [63]"),
        (lambda header: header[NORM].update(shape=[2**32, 2**32]), "expected 73786976294838206464 bytes apart"),
        (lambda header: header[NORM].update(shape=[-64]), f"tensor {NORM}.shape is [-64], expected 0 to 8 counts"),
        (lambda header: header[NORM].update(shape=[64.0]), f"tensor {NORM}.shape is [64.0]"),
        (lambda header: header[NORM].update(shape=[8, 8]), "has the shape [8, 8], expected [64] by config.json"),
        (lambda header: header[NORM].update(extra=1), "expected an object of dtype, shape and data_offsets alone"),
        (set_offsets(NORM, 0, 256), "overlapping the one before it by"),
        (lambda header: header.update({"": header.pop(NORM)}), "a tensor's name is ''"),
        (lambda header: header.update({"../../etc/x": header.pop(NORM)}), "a tensor's name is '../../etc/x'"),
        (lambda header: header.update({"a\x00b": header.pop(NORM)}), "a tensor's name is 'a\\x00b'"),
        (lambda header: header.update({"x" * 600: header.pop(NORM)}), "a tensor's name is 'xxx"),
        (lambda header: header.update(extra=header.pop(NORM)), f"tensor {NORM} is missing in the checkpoint"),
        (
            lambda header: header.update(__metadata__={"a": 1}),
            "__metadata__ is {'a': 1}, expected an object of texts",
        ),
    ],
)
def test_a_header_that_lies(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], expected: str
) -> None:
    edit_header(folder / WEIGHTS, change)
    assert expected in refusal(folder, tmp_path / "work")


def test_a_hole(folder: Path, tmp_path: Path) -> None:
    coded = {"a": ("F32", (2,), bytes(8)), "b": ("F32", (2,), bytes(8)), "c": ("F32", (2,), bytes(8))}
    write_safetensors(folder / WEIGHTS, coded)
    edit_header(folder / WEIGHTS, lambda header: header.pop("b"))
    assert "tensor c is behind a hole of 8 bytes" in refusal(folder, tmp_path / "work")


def test_a_duplicate_tensor_name(folder: Path, tmp_path: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = b'"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}, '
    header = b"{" + entry + data[9 : 8 + length]
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    assert f"the header is an object with the key '{NORM}' twice" in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, "the header length is 0, expected from 2 to"),
        (2**63, "the header length is 9223372036854775808, expected from 2 to"),
        (200_000_000, "the header length is 200000000, expected from 2 to"),
        (60_000_000, "the header length is 60000000, expected from 2 to"),
    ],
)
def test_a_header_length_that_lies(folder: Path, tmp_path: Path, length: int, expected: str) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + data[8:])
    assert expected in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize("cut", [1, 100_000])
def test_a_truncated_file(folder: Path, tmp_path: Path, cut: int) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - cut)
    assert re.search(
        r"the size is \d+ bytes, expected \d+, where the last tensor ends; copy or download the file",
        refusal(folder, tmp_path / "work"),
    )


def test_bytes_behind_the_last_tensor(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"hidden")
    size_bytes = (folder / WEIGHTS).stat().st_size
    expected = f"the size is {size_bytes} bytes, expected {size_bytes - 6}, where the last tensor ends"
    assert expected in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 3) + b"[1]", struct.pack("<Q", 2) + b"\xff\xff"])
def test_no_safetensors_at_all(folder: Path, tmp_path: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert refusal(folder, tmp_path / "work").startswith("model.safetensors")


# --- tensors against the configuration


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"hidden_size": 128, "head_dim": 16},
            "model.embed_tokens.weight has the shape [384, 64], expected [384, 128]",
        ),
        ({"vocab_size": 400}, "model.embed_tokens.weight has the shape [384, 64], expected [400, 64]"),
        ({"intermediate_size": 96}, "mlp.gate_proj.weight has the shape [160, 64], expected [96, 64]"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.input_layernorm.weight has no place in a llama model"),
        ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
        ({"model_type": "qwen2"}, "self_attn.q_proj.bias is missing"),
        ({"tie_word_embeddings": True}, "lm_head.weight and model.embed_tokens.weight differ"),
    ],
)
def test_a_config_that_disagrees_with_the_tensors(
    folder: Path, tmp_path: Path, values: dict[str, Any], expected: str
) -> None:
    edit_config(folder, **values)
    assert expected in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38, -65536])
def test_weights_that_no_artifact_can_hold(folder: Path, tmp_path: Path, dtype: str, value: float) -> None:
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    weights["model.layers.1.mlp.up_proj.weight"][3, 5:22] = value
    coded = {name: (DTYPES[dtype], array.shape, encode(array, "float32")) for name, array in weights.items()}
    with np.errstate(over="ignore"):  # 3e38 in float16
        for name, array in weights.items():
            coded[name] = (DTYPES[dtype], array.shape, finite_or_not(array, dtype))
    write_safetensors(folder / WEIGHTS, coded)
    assert refusal(folder, tmp_path / "work") == (
        "model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds 17 values that are NaN, infinite "
        "or beyond 65504, expected none; the weights are damaged, or not of a trained model"
    )


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_largest_weights_of_an_artifact(folder: Path, tmp_path: Path, dtype: str) -> None:
    largest = 65280 if dtype == "bfloat16" else 65504
    rewrite(folder, lambda weights: weights["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 5), -largest), dtype)
    assert run(folder, tmp_path / "work").spec.num_hidden_layers == 2


def finite_or_not(values: np.ndarray, dtype: str) -> bytes:
    """As `encode`, without rounding, which would carry a NaN into the sign."""
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes() if dtype == "bfloat16" else encode(values, dtype)


# --- shards


def test_an_index_that_leaves_the_folder(sharded: Path, tmp_path: Path) -> None:
    for file in (
        "../model.safetensors",
        "/etc/x.safetensors",
        "a\\b.safetensors",
        "..safetensors",
        "sub/x.safetensors",
    ):
        edit(sharded / INDEX, lambda index, file=file: index["weight_map"].update({EMBED: file}))
        assert "is not a plain safetensors name" in refusal(sharded, tmp_path / "work")


def test_an_index_that_names_a_link(sharded: Path, tmp_path: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "away.safetensors")
    shard.symlink_to(tmp_path / "away.safetensors")
    assert "model-00002-of-00003.safetensors is a link that leads out" in refusal(sharded, tmp_path / "work")


def test_a_missing_shard(sharded: Path, tmp_path: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing in the checkpoint" in refusal(sharded, tmp_path / "work")


def test_a_tensor_that_is_not_in_its_shard(sharded: Path, tmp_path: Path) -> None:
    edit(sharded / INDEX, lambda index: index["weight_map"].update({"extra": "model-00001-of-00003.safetensors"}))
    assert "model-00001-of-00003.safetensors: tensor extra is missing" in refusal(sharded, tmp_path / "work")


def test_a_tensor_in_two_shards(sharded: Path, tmp_path: Path) -> None:
    first, last = (sharded / f"model-0000{number}-of-00003.safetensors" for number in (1, 3))
    last.write_bytes(first.read_bytes())
    assert re.search(r"tensor model\.\S+ is in two shards", refusal(sharded, tmp_path / "work"))


def test_a_tensor_the_index_does_not_know_is_read_and_said(
    sharded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(sharded, tmp_path / "whole")
    edit(sharded / INDEX, lambda index: index["weight_map"].pop(EMBED))
    assert run(sharded, tmp_path / "work").weights_sha256 == whole.weights_sha256
    assert f"the index of the weights does not name {EMBED}, which model-00001-of-00003.safetensors has" in caplog.text


def test_a_tensor_in_another_shard_than_the_index_says(sharded: Path, tmp_path: Path) -> None:
    edit(sharded / INDEX, lambda index: index["weight_map"].update({EMBED: "model-00002-of-00003.safetensors"}))
    assert "the index says model-00002-of-00003.safetensors; download both again" in refusal(sharded, tmp_path / "work")


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", INDEX, "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_in_a_file_s_place(sharded: Path, tmp_path: Path, name: str) -> None:
    (sharded / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1044992\n")
    assert f"{name} is a pointer of git-lfs, not the file itself; run `git lfs pull`" in refusal(
        sharded, tmp_path / "work"
    )


def test_an_index_of_names_without_end(sharded: Path, tmp_path: Path) -> None:
    name = "x\x1b[2J" * 1000
    edit(sharded / INDEX, lambda index: index["weight_map"].update({name: next(iter(index["weight_map"].values()))}))
    text = refusal(sharded, tmp_path / "work")
    assert "(5000 characters) is missing, the index says it is there" in text
    assert text.isprintable()


def test_an_index_without_a_map(sharded: Path, tmp_path: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {"a": 1}}')
    assert "weight_map is missing or not a map of texts" in refusal(sharded, tmp_path / "work")
