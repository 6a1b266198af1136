"""Reads checkpoints that store all experts of a layer in one tensor, plain or packed in MXFP4, and refuses bad ones."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.checkpoint import mxfp4, tensors
from coldpress.compiler.checkpoint.tensors import read_role, read_rows, stored_dtype
from coldpress.compiler.io import Workspace, load_record, save_record
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import Model
from tests.support._planted_gpt_oss import pack
from tests.support.hf import load_hf
from tests.support.models import encode, random_weights, write_model, write_safetensors

LAYERS, EXPERTS, HIDDEN, WIDTH = 11, 4, 64, 160
PACKED = ("gate_up_proj", "down_proj")
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def number(code: int, scale: int) -> float:
    """What the standard says about four bits and a scale (Microscaling Formats 1.0, sections 5.3.3 and 5.4.1)."""
    return (-1) ** (code >> 3) * MAGNITUDES[code & 7] * 2.0 ** (scale - 127)


def packed_experts(random: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns blocks [E, rows, groups, 16], scales [E, rows, groups] and their values [E, rows, columns]."""
    blocks = random.integers(0, 256, (EXPERTS, rows, columns // 32, 16), np.uint8)
    scales = random.integers(121, 124, blocks.shape[:-1], np.uint8)
    pairs = np.array([[number(byte % 16, 127), number(byte // 16, 127)] for byte in range(256)])
    values = pairs[blocks].reshape(*scales.shape, 32) * 2.0 ** (scales[..., None].astype(int) - 127)
    return blocks, scales, values.reshape(EXPERTS, rows, columns)


def written(folder: Path, packed: bool, change: Callable[[Tensors], None] | None = None, files: int = 1) -> Path:
    """Writes a random gpt_oss, with its experts packed or as the numbers that the packed ones stand for."""
    write_model(folder, "gpt_oss", num_hidden_layers=LAYERS)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    found, random = Tensors(), np.random.default_rng(3)
    for name, values in random_weights(config).items():
        if not name.endswith(PACKED):
            found[name] = "BF16", values.shape, encode(values, "bfloat16")
            continue
        blocks, scales, numbers = packed_experts(random, values.shape[2], values.shape[1])
        if packed:
            found[f"{name}_blocks"] = "U8", blocks.shape, blocks.tobytes()
            found[f"{name}_scales"] = "U8", scales.shape, scales.tobytes()
        else:
            found[name] = "BF16", values.shape, encode(numbers.transpose(0, 2, 1), "bfloat16")
    if packed:
        method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    if change is not None:
        change(found)
    shards = [{name: found[name] for name in list(found)[shard::files]} for shard in range(files)]
    names = [f"model-{shard}.safetensors" if files > 1 else "model.safetensors" for shard in range(files)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard)
    if files > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def ingested(folder: Path) -> Model:
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """A packed checkpoint whose blocks and scales are in different files, and the same one as numbers."""
    folder = tmp_path_factory.mktemp("mxfp4")
    return ingested(written(folder / "packed", True, files=2)), ingested(written(folder / "numbers", False))


@pytest.mark.parametrize("scale", [0, 1, 126, 127, 140])
def test_every_code_is_the_number_that_the_standard_gives(scale: int) -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(2, 8, 16)
    bits = mxfp4.decode_bfloat16(blocks, np.full((2, 8), scale, np.uint8))
    found = (bits.astype(np.uint32) << 16).view(np.float32)
    expected = [number(code, scale) for byte in blocks.ravel().tolist() for code in (byte % 16, byte // 16)]
    assert found.ravel().tolist() == expected


def test_a_packed_checkpoint_has_the_weights_of_its_numbers(models: tuple[Model, Model]) -> None:
    packed, numbers = models
    assert (packed.spec, packed.num_parameters) == (numbers.spec, numbers.num_parameters)
    assert packed.tensors.keys() == numbers.tensors.keys()
    of_experts = [role for role in packed.tensors if ".experts." in role]
    assert len(of_experts) == LAYERS * EXPERTS * 6
    for role in packed.tensors:
        found = read_role(packed, role)
        assert found.tobytes() == read_role(numbers, role).tobytes(), role
        assert found.shape == packed.tensors[role].shape
        assert stored_dtype(packed, role) == stored_dtype(numbers, role) == "BF16"
        if role in of_experts:
            first, last = len(found) // 3, len(found) // 2
            assert (read_rows(packed, role, first, last) == found[first:last]).all()
            assert (read_rows(numbers, role, first, last) == found[first:last]).all()
    of_all = {packed.tensors[role].tensor for role in of_experts if role.endswith(".weight")}
    assert {tensor.rpartition(".")[2] for tensor in of_all} == {f"{name}_blocks" for name in PACKED}


def test_experts_are_where_transformers_has_them(models: tuple[Model, Model]) -> None:
    """Its layers compute with the numbers' checkpoint; ours with the packed one."""
    import torch

    packed, numbers = models
    tokens = np.random.default_rng(0).integers(0, packed.spec.vocab_size, (2, 40)).astype(np.int32)
    whole = load_hf(Path(numbers.tensors["norm.weight"].file).resolve().parent)
    with torch.no_grad():
        expected = whole(torch.from_numpy(tokens).long()).logits.numpy()
    found = LayerStream(packed).logits(tokens)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_record_keeps_its_places(models: tuple[Model, Model], tmp_path: Path) -> None:
    save_record(models[0], tmp_path / "a" / "ingest.json")
    (tmp_path / "a").rename(tmp_path / "b")
    assert load_record(tmp_path / "b" / "ingest.json", Model).tensors == models[0].tensors
    plain = json.loads((tmp_path / "b" / "ingest.json").read_text())["tensors"]["norm.weight"]
    assert not {"index", "transposed", "scales"} & plain.keys()  # older records have the same bytes


def test_one_expert_is_read_at_a_time(models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    read = tensors._read_bytes

    def counted(path: Path, offset: int, into: np.ndarray) -> None:
        sizes.append(into.size)
        read(path, offset, into)

    monkeypatch.setattr(tensors, "_read_bytes", counted)
    for model, largest in zip(models, (HIDDEN * WIDTH, 2 * HIDDEN * 2 * WIDTH), strict=True):
        sizes.clear()
        for role in ("gate_proj", "up_proj"):
            for row in range(0, WIDTH, 40):
                read_rows(model, f"layers.3.experts.2.{role}.weight", row, row + 40)
        assert max(sizes) == largest
        assert sum(sizes) < 1.1 * largest  # gate and up are read together, once


def changed(name: str, dtype: str, shape: tuple[int, ...], byte: int = 0) -> Callable[[Tensors], None]:
    def change(found: Tensors) -> None:
        size = int(np.prod(shape)) * {"U8": 1, "I8": 1, "F16": 2}[dtype]
        found[f"model.layers.1.mlp.experts.{name}"] = dtype, shape, bytes([byte]) * size

    return change


def without(name: str) -> Callable[[Tensors], None]:
    return lambda found: found.pop(f"model.layers.1.mlp.experts.{name}") and None


SCALES = (EXPERTS, HIDDEN, WIDTH // 32)
REFUSED: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "no scales": (without("down_proj_scales"), "down_proj_scales is missing in the checkpoint"),
    "no blocks": (without("down_proj_blocks"), r"experts\.down_proj is missing in the checkpoint"),
    "scales too large": (
        changed("down_proj_scales", "U8", SCALES, 141),
        r"down_proj_scales holds 1280 values that are",
    ),
    "an expert less": (
        changed("gate_up_proj_scales", "U8", (EXPERTS - 1, 2 * WIDTH, HIDDEN // 32), 1),
        r"gate_up_proj_scales has the shape \[3, 320, 2\], expected \[4, 320, 2\]",
    ),
    "blocks of 32": (
        changed("down_proj_blocks", "U8", (EXPERTS, HIDDEN, WIDTH // 32, 32)),
        r"down_proj_blocks has the shape \[4, 64, 5, 32\], expected \[4, 64, 5, 16\]",
    ),
    "signed bytes": (changed("down_proj_scales", "I8", SCALES), "has the unsupported dtype I8, expected U8"),
    "both": (
        changed("down_proj", "F16", (EXPERTS, WIDTH, HIDDEN)),
        r"experts\.down_proj has no place in a gpt_oss model",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    change, sentence = REFUSED[name]
    with pytest.raises(CheckpointError, match=sentence):
        ingested(written(tmp_path, True, change))


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    model = ingested(written(tmp_path, True))
    role = "layers.1.experts.0.down_proj.weight"
    assert read_role(model, role).shape == (HIDDEN, WIDTH)
    written(tmp_path, False)
    with pytest.raises(CheckpointError, match="down_proj_blocks is no longer what ingest found"):
        read_role(model, role)


def test_packing_takes_the_nearest_number_of_a_group() -> None:
    """What planted checkpoints store; the largest of a group may be cut to 6 times its power of two."""
    values = np.random.default_rng(1).standard_normal((40, 96)).astype(np.float32)
    blocks, scales = pack(values)
    found = (mxfp4.decode_bfloat16(blocks, scales).astype(np.uint32) << 16).view(np.float32)
    known = np.array([sign * magnitude for magnitude in MAGNITUDES for sign in (-1, 1)])
    powers = 2.0 ** (scales.astype(int) - 127)
    groups = values.reshape(40, 3, 32) / powers[..., None]
    nearest = np.abs(groups[..., None] - known).min(axis=-1)
    assert np.abs(found.reshape(groups.shape) / powers[..., None] - groups) == pytest.approx(nearest, abs=1e-6)
    assert ((np.abs(groups).max(axis=2) >= 4) & (np.abs(groups).max(axis=2) < 8)).all()
