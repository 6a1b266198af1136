"""quantize: every unit holds the slices it must, whatever the blocks and chunks; what stays in DRAM is complete."""

import tracemalloc

import numpy as np
import pytest

from coldpress.compiler.cost_model import resident_bytes
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.rounding import _weights
from coldpress.compiler.rounding._weights import Algorithm
from coldpress.compiler.stages import quantize
from coldpress.compiler.stages.quantize import QuantizeConfig, run
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.schemas.errors import CheckpointError, UnknownNameError
from coldpress.schemas.families import FAMILIES, num_units, slice_shape, slices
from coldpress.schemas.model import role_shape
from tests.support.artifacts import encode_slices
from tests.support.methods import families_of
from tests.support.records import tiny_sparsity
from tests.support.tiny import hashed, tensor_shapes, tiny_model, tiny_spec

METHODS = ("dense", "relu", "predictor", "topk")


def quantized(tmp_path, model, method="topk", format_name="fp16", layers=(0, 1), key="work"):
    return run(
        QuantizeConfig(), model, tiny_sparsity(model, method, format_name), layers, Workspace(tmp_path / key, "f")
    )


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format_name", names("coldpress.runtime.quantization"))
@pytest.mark.parametrize("method", METHODS)
def test_a_unit_is_its_slices_one_after_another(tmp_path, method, format_name, gated):
    spec = tiny_spec(gated_mlp=gated)
    model = tiny_model(tmp_path / "model", spec)
    result = quantized(tmp_path, model, method, format_name)
    rounding = load("coldpress.runtime.quantization", Format, format_name)
    for layer in result.layers:
        arrays = load_arrays(layer.arrays)
        for family in families_of(method, spec):
            units = arrays[f"units.{family}"]
            start = 0
            for piece in slices(family, spec):
                role = f"layers.{layer.layer}.{piece.role}.weight"
                weight = hashed(role, *tensor_shapes(spec)[role]) * np.float32(0.25)
                expected = encode_slices(weight, piece, rounding)
                count, length = slice_shape(piece, spec)
                width = count * rounding.nbytes(length)
                assert np.array_equal(units[:, start : start + width], expected), (family, piece)
                start += width
            assert units.shape == (num_units(family, spec), start)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "expert"])
def test_every_family_holds_its_slices(tmp_path, family):
    model = tiny_model(tmp_path / "model", tiny_spec(num_key_value_heads=1, intermediate_size=64))
    units = quantize.encode_units(
        load("coldpress.compiler.rounding", Algorithm, "rtn"),
        model,
        1,
        family,
        "int8_group32",
        quantize.InputStatistics(),
    )
    codec = load("coldpress.runtime.quantization", Format, "int8_group32")
    expected = []
    for piece in FAMILIES[family].slices:
        role = f"layers.1.{piece.role}.weight"
        weight = hashed(role, *tensor_shapes(model.spec)[role]) * np.float32(0.25)
        expected.append(encode_slices(weight, piece, codec))
    np.testing.assert_array_equal(units, np.concatenate(expected, axis=1))
    assert len(units) == num_units(family, model.spec)


@pytest.mark.parametrize("family", ["neuron", "mlp_in"])
def test_units_of_experts_follow_each_other(tmp_path, family):
    spec = tiny_spec(num_experts=3)
    roles = ("gate_proj", "up_proj", "down_proj")
    weights = {
        f"layers.0.experts.{expert}.{role}.weight": hashed(f"{expert}{role}", *role_shape(spec, f"{role}.weight"))
        for expert in range(3)
        for role in roles
    }
    model = tiny_model(tmp_path / "model", spec, **{role.replace(".", "__"): array for role, array in weights.items()})
    units = quantize.encode_units(
        load("coldpress.compiler.rounding", Algorithm, "rtn"), model, 0, family, "fp16", quantize.InputStatistics()
    )
    assert len(units) == num_units(family, spec) == {"neuron": 3 * 72, "mlp_in": 3 * 64}[family]
    last = [weights[f"layers.0.experts.2.{role}.weight"] for role in roles]
    pieces = {
        "neuron": [last[0][5], last[1][5], last[2][:, 5]],
        "mlp_in": [last[0][:, 5], last[1][:, 5]],
    }[family]
    unit = 2 * (len(units) // 3) + 5
    np.testing.assert_array_equal(units[unit].view(np.float16), np.concatenate(pieces).astype(np.float16))


def test_blocks_and_chunks_change_no_byte(tmp_path, monkeypatch):
    model = tiny_model(tmp_path / "model")
    whole = quantized(tmp_path, model, "predictor", "int4_group32", key="whole")
    monkeypatch.setattr(_weights, "BLOCK_BYTES", 700)
    monkeypatch.setattr(_weights, "BAND_ROWS", 7)
    parts = [quantized(tmp_path, model, "predictor", "int4_group32", (layer,), f"part{layer}") for layer in (1, 0)]
    assert [part.shared is None for part in parts] == [True, False]
    assert parts[1].shared_resident == whole.shared_resident
    assert parts[1].shared.sha256 == whole.shared.sha256
    found = {layer.layer: layer.arrays.sha256 for part in parts for layer in part.layers}
    assert found == {layer.layer: layer.arrays.sha256 for layer in whole.layers}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("format_name", names("coldpress.runtime.quantization"))
def test_resident_tensors_are_all_there_in_their_formats(tmp_path, method, format_name):
    model = tiny_model(tmp_path / "model")
    result = quantized(tmp_path, model, method, format_name)
    tensors = [*result.shared_resident, *(tensor for layer in result.layers for tensor in layer.resident)]
    stored = {**load_arrays(result.shared)}
    for layer in result.layers:
        stored |= {f"layers.{layer.layer}.{name}": array for name, array in load_arrays(layer.arrays).items()}
    flash = {piece.role for family in families_of(method, model.spec) for piece in slices(family, model.spec)}
    on_flash = {f"layers.{layer}.{role}.weight" for layer in (0, 1) for role in flash}
    assert {tensor.role for tensor in tensors} == set(model.tensors) - on_flash | {"rotary.inv_freq"}
    formats = {tensor.role: tensor.format for tensor in tensors}
    assert formats["layers.1.q_proj.weight"] == format_name
    assert formats["embed_tokens.weight"] == formats["lm_head.weight"]
    assert formats["embed_tokens.weight"] == ("fp16" if format_name == "fp16" else "int8_group32")
    assert formats["norm.weight"] is formats["layers.0.input_layernorm.weight"] is formats["rotary.inv_freq"] is None
    for tensor in tensors:
        if tensor.format is not None:
            weight = hashed(tensor.role, *tensor.shape) * np.float32(0.25)
            assert np.array_equal(
                stored[tensor.role], load("coldpress.runtime.quantization", Format, tensor.format).encode(weight)
            )
        elif tensor.role != "rotary.inv_freq":
            assert stored[tensor.role].dtype == np.float32
            assert stored[tensor.role].shape == tensor.shape
    total = sum(stored[tensor.role].nbytes for tensor in tensors if tensor.role != "embed_tokens.weight")  # by row
    assert total == resident_bytes(model, families_of(method, model.spec), format_name)


def test_a_tied_head_is_not_stored_twice(tmp_path):
    model = tiny_model(tmp_path / "model", tiny_spec(tie_word_embeddings=True), lm_head__weight=np.zeros((384, 64)))
    result = quantized(tmp_path, model)
    assert "embed_tokens.weight" in {tensor.role for tensor in result.shared_resident}
    assert "lm_head.weight" not in {tensor.role for tensor in result.shared_resident}


@pytest.mark.parametrize("role", ["layers.1.down_proj.weight", "layers.0.q_proj.weight", "embed_tokens.weight"])
def test_a_value_beyond_fp16_is_named(tmp_path, role):
    shape = tensor_shapes(tiny_spec())[role]
    values = np.zeros(shape, np.float32)
    values[-1, -1] = -70000
    model = tiny_model(tmp_path / "model", **{role.replace(".", "__"): values})
    with pytest.raises(CheckpointError, match=rf"^{role}: .*fp16.*70000.*65504"):
        quantized(tmp_path, model)


def test_unknown_algorithm_lists_the_choices(tmp_path):
    model = tiny_model(tmp_path / "model")
    with pytest.raises(UnknownNameError, match=r"unknown rounding 'rnt'\. Did you mean 'rtn'"):
        run(QuantizeConfig(algorithm="rnt"), model, tiny_sparsity(model), (0,), Workspace(tmp_path / "work", "f"))


def test_an_interrupted_run_resumes_with_finished_layers(tmp_path):
    model = tiny_model(tmp_path / "model")
    first = quantized(tmp_path, model)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert quantized(tmp_path, model) == first


def test_memory_is_one_matrix_and_its_codes(tmp_path, monkeypatch):
    monkeypatch.setattr(_weights, "BLOCK_BYTES", 1 << 17)
    spec = tiny_spec(hidden_size=256, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=1)
    model = tiny_model(tmp_path / "model", spec)
    matrix, codes = 4 * 256 * 4096, 3 * 2 * 256 * 4096
    tracemalloc.start()
    try:
        quantize.encode_units(
            load("coldpress.compiler.rounding", Algorithm, "rtn"),
            model,
            0,
            "neuron",
            "fp16",
            quantize.InputStatistics(),
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert codes + matrix < peak < codes + 1.75 * matrix  # the codes of one matrix are put into the units whole


@pytest.mark.parametrize("format_name", names("coldpress.runtime.quantization"))
def test_a_tensor_that_the_format_ruins_is_named(tmp_path, caplog, format_name):
    """Scales underflow in float16; ordinary weights are not warned of."""
    values = np.random.default_rng(0).standard_normal((70, 64)).astype(np.float32) * np.float32(0.02)
    rounding = load("coldpress.compiler.rounding", Algorithm, "rtn")
    for factor, role in ((1, "whole"), (0, "zeros"), (1e-6, "tiny")):
        scaled = values * np.float32(factor)
        weights = _weights.Weights(70, 64, "row", lambda start, stop, of=scaled: of[start:stop])
        quantize._encode(rounding, weights, role, format_name)
    assert [record.getMessage().split()[2] for record in caplog.records] == ["tiny"]
    assert f"of its norm in {format_name}" in caplog.text
