"""Reading a checkpoint's tensors by role: every dtype, fused rows, and files that changed since ingest."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.checkpoint.tensors import decode_floats, read_role, read_rows, rotary_inv_freq
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import Model
from tests.support.models import encode, random_weights, write_model


def ingested(folder: Path) -> Model:
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return random_weights(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_floats_are_decoded_exactly(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    values = np.array([0, -0.0, 1, -1.5, 3.1415927, 65504, 1e-7, -6e-8, 2**-24], np.float32)
    kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    name = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    expected = torch.from_numpy(values).to(kind).float().numpy()
    found = decode_floats(np.frombuffer(encode(values, name), np.uint8), dtype)
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fused_tensors_are_read_by_their_rows(tmp_path: Path, dtype: str) -> None:
    model = ingested(write_model(tmp_path / "tiny", "phi3", num_hidden_layers=2, dtype=dtype, num_shards=2))
    weights = weights_of(tmp_path / "tiny")
    parts = [read_role(model, f"layers.1.{name}_proj.weight") for name in "qkv"]
    assert [part.shape for part in parts] == [(64, 64), (32, 64), (32, 64)]
    for found, name in (
        (parts, "self_attn.qkv_proj"),
        ([read_role(model, f"layers.1.{name}_proj.weight") for name in ("gate", "up")], "mlp.gate_up_proj"),
    ):
        exact = weights[f"model.layers.1.{name}.weight"]
        assert np.allclose(np.concatenate(found), exact, rtol=2**-8, atol=0.01)
        stored = decode_floats(np.frombuffer(encode(exact, dtype), np.uint8), _code(dtype)).reshape(exact.shape)
        assert np.array_equal(np.concatenate(found), stored)
    up = parts[2]
    assert np.array_equal(read_rows(model, "layers.1.v_proj.weight", 5, 9), up[5:9])


def _code(dtype: str) -> str:
    return {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]


def test_only_the_rows_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ingested(write_model(tmp_path / "tiny", "phi3", num_hidden_layers=1))
    sizes: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: sizes.append(len(into[0])) or real(fd, into, offset))
    read_role(model, "layers.0.k_proj.weight")
    read_rows(model, "embed_tokens.weight", 7, 9)
    assert sizes == [32 * 64 * 4, 2 * 64 * 4]


def test_a_role_that_is_not_there(tmp_path: Path) -> None:
    model = ingested(write_model(tmp_path / "tiny", num_hidden_layers=1))
    with pytest.raises(CheckpointError, match=r"model tiny has no tensor with the role layers\.1\.up_proj\.weight"):
        read_role(model, "layers.1.up_proj.weight")


def test_a_checkpoint_that_changed_since_ingest(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", num_hidden_layers=1)
    model = ingested(folder)
    write_model(folder, num_hidden_layers=1, intermediate_size=96)
    with pytest.raises(CheckpointError, match="is no longer what ingest found; rebuild from ingest on"):
        read_role(model, "layers.0.up_proj.weight")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read \(No such file or directory\)"):
        read_role(model, "layers.0.up_proj.weight")


def test_frequencies_are_the_plain_formula_by_default(tmp_path: Path) -> None:
    model = ingested(write_model(tmp_path / "tiny", num_hidden_layers=1))
    found = rotary_inv_freq(model)
    assert found.dtype == np.float32
    assert np.allclose(found, 10000.0 ** -(np.arange(0, 16, 2) / 16), rtol=1e-6)
    assert np.array_equal(found, rotary_inv_freq(model))


def test_learned_positions_have_no_frequencies(tmp_path: Path) -> None:
    model = ingested(write_model(tmp_path / "tiny", "opt", num_hidden_layers=1))
    with pytest.raises(CheckpointError, match="no layer of model tiny has rotary frequencies of the kind main"):
        rotary_inv_freq(model)
