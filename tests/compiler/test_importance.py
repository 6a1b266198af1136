"""importance: both forms of llama.cpp's importance matrices, by role; what is none of this model ends in a sentence."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages.importance import ImportanceConfig, open_imatrix, run
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import resident_roles
from coldpress.schemas.gram import Importance
from coldpress.schemas.model import Model, ModelSpec, role_shape
from tests.support.imatrices import NAMES, write_gguf, write_legacy
from tests.support.models import write_safetensors
from tests.support.tiny import describe, tensor_shapes, tiny_spec

WRITERS = {"legacy": write_legacy, "gguf": write_gguf}


@pytest.fixture(params=list(WRITERS))
def write(request):
    return WRITERS[request.param]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    spec = tiny_spec()
    return describe(spec, tensor_shapes(spec), tmp_path / "none")


def means_of(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Mean squares by llama.cpp's names, of all matrices; all numbers are different, and exact in float32."""
    found, start = {}, 1
    for layer in range(spec.num_hidden_layers):
        for role in resident_roles((), spec):
            size = role_shape(spec, f"{role}.weight")[1]
            found[f"blk.{layer}.{NAMES[role]}.weight"] = np.arange(start, start + size, dtype=np.float32)
            start += size
    return found


def read(model: Model, path: Path) -> Importance:
    return run(ImportanceConfig(imatrix=str(path)), model, Workspace(path.parent / "work", "test"))


def refusal(model: Model, path: Path) -> str:
    with pytest.raises(ColdpressError) as caught:
        read(model, path)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    assert str(path) in text
    return text


def test_every_matrix_has_the_mean_squares_of_its_inputs(model: Model, tmp_path: Path, write) -> None:
    means = means_of(model.spec)
    found = read(model, write(tmp_path / "imatrix", means))
    assert found.shared is None
    for layer in found.layers:
        arrays = load_arrays(layer.arrays)
        assert set(arrays) == set(resident_roles((), model.spec))
        for role, values in arrays.items():
            np.testing.assert_allclose(values, means[f"blk.{layer.layer}.{NAMES[role]}.weight"], rtol=1e-6)
            assert values.dtype == np.float32


def test_the_head_is_read_where_there_is_one(model: Model, tmp_path: Path, write) -> None:
    means = means_of(model.spec) | {"output.weight": np.full(model.spec.hidden_size, 7, np.float32)}
    path = write(tmp_path / "imatrix", means)
    shared = read(model, path).shared
    assert shared is not None
    assert (load_arrays(shared)["lm_head"] == 7).all()
    tied = tiny_spec(tie_word_embeddings=True)
    assert read(describe(tied, tensor_shapes(tied), tmp_path / "none"), path).shared is None


def test_what_a_checkpoint_stores_fused_is_fused_in_gguf_too(model: Model, tmp_path: Path, write) -> None:
    """As of Phi-3: one tensor of q, k and v, one of gate and up, which llama.cpp calls up."""
    owners = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
    tensors = {
        role: source.model_copy(update={"tensor": f"{role.split('.')[1]}.{owners.get(role.split('.')[2], role)}"})
        if role.startswith("layers.")
        else source
        for role, source in model.tensors.items()
    }
    means = means_of(model.spec)
    for layer in range(2):
        for name in ("attn_k", "attn_v", "ffn_gate"):
            del means[f"blk.{layer}.{name}.weight"]
        means[f"blk.{layer}.attn_qkv.weight"] = means.pop(f"blk.{layer}.attn_q.weight")
    found = read(model.model_copy(update={"tensors": tensors}), write(tmp_path / "imatrix", means))
    arrays = load_arrays(found.layers[1].arrays)
    for role in ("q_proj", "k_proj", "v_proj"):
        np.testing.assert_allclose(arrays[role], means["blk.1.attn_qkv.weight"], rtol=1e-6)
    for role in ("gate_proj", "up_proj"):
        np.testing.assert_allclose(arrays[role], means["blk.1.ffn_up.weight"], rtol=1e-6)


def experts(tmp_path: Path) -> tuple[Model, dict[str, np.ndarray]]:
    """A layer of three experts, and mean squares [experts, inputs] of each of their matrices."""
    spec = tiny_spec(num_experts=3, num_hidden_layers=1)
    dense = means_of(spec)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    shapes = {f"layers.0.{role}.weight": role_shape(spec, f"{role}.weight") for role in attention}
    means = {name: dense[name] for name in (f"blk.0.{NAMES[role]}.weight" for role in attention)}
    shapes |= {
        f"layers.0.experts.{expert}.{role}.weight": role_shape(spec, f"{role}.weight")
        for expert in range(3)
        for role in ("gate_proj", "up_proj", "down_proj")
    }
    for role in ("gate_proj", "up_proj", "down_proj"):
        size = role_shape(spec, f"{role}.weight")[1]
        means[f"blk.0.{NAMES[role]}_exps.weight"] = np.arange(3 * size, dtype=np.float32).reshape(3, size)
    shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return describe(spec, shapes, tmp_path / "none"), means


@pytest.mark.parametrize("stacked", [False, True])
def test_each_expert_has_its_part(tmp_path: Path, write, stacked: bool) -> None:
    """Also of a checkpoint that has all experts' gate and up in one tensor: llama.cpp has them in two."""
    model, means = experts(tmp_path)
    if stacked:
        of_experts = {role: source for role, source in model.tensors.items() if ".experts." in role}
        places = {
            role: source.model_copy(update={"tensor": "down" if "down" in role else "both", "index": int(role[17])})
            for role, source in of_experts.items()
        }
        model = model.model_copy(update={"tensors": model.tensors | places})
    arrays = load_arrays(read(model, write(tmp_path / "imatrix", means)).layers[0].arrays)
    for expert in range(3):
        for role in ("gate_proj", "up_proj", "down_proj"):
            expected = means[f"blk.0.{NAMES[role]}_exps.weight"][expert]
            np.testing.assert_allclose(arrays[f"experts.{expert}.{role}"], expected, rtol=1e-6)


def test_an_expert_that_no_token_was_sent_to_has_inputs_alike(tmp_path: Path) -> None:
    model, means = experts(tmp_path)
    name = "blk.0.ffn_up_exps.weight"
    arrays = load_arrays(read(model, write_gguf(tmp_path / "imatrix", means, {name: [10, 0, 1]})).layers[0].arrays)
    assert (arrays["experts.1.up_proj"] == 1).all()
    np.testing.assert_allclose(arrays["experts.2.up_proj"], means[name][2], rtol=1e-6)


def test_a_file_cut_short_anywhere_is_refused(model: Model, tmp_path: Path, write) -> None:
    whole = write(tmp_path / "whole", means_of(model.spec)).read_bytes()
    path = tmp_path / "imatrix"
    # number of chunks and the text's name, which need not be there; what fills up the last tensor
    trailer = 12 if write is write_legacy else 28
    for length in [*range(0, 400, 7), *range(400, len(whole) - trailer, 997), len(whole) - trailer - 1]:
        path.write_bytes(whole[:length])
        assert "imatrix" in refusal(model, path)


def test_a_matrix_that_is_missing_is_named(model: Model, tmp_path: Path, write) -> None:
    means = means_of(model.spec)
    del means["blk.1.ffn_down.weight"]
    assert "has no entry blk.1.ffn_down.weight" in refusal(model, write(tmp_path / "imatrix", means))


def test_another_models_matrix_is_refused(model: Model, tmp_path: Path, write) -> None:
    means = means_of(model.spec) | {"blk.0.attn_k.weight": np.ones(63, np.float32)}
    assert "63 values for blk.0.attn_k.weight, expected 64" in refusal(model, write(tmp_path / "imatrix", means))


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_what_is_no_mean_square_is_refused(model: Model, tmp_path: Path, write, value: float) -> None:
    means = means_of(model.spec)
    means["blk.1.attn_q.weight"][5] = value
    assert "blk.1.attn_q.weight holds NaN" in refusal(model, write(tmp_path / "imatrix", means))


def gguf_bytes(tensors: int, keys: list[bytes], rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(keys)) + b"".join(keys) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


KIND = text("general.type") + struct.pack("<I", 8) + text("imatrix")
HOSTILE = {
    "empty": (b"", "bytes are promised"),
    "zeros": (bytes(64), "neither GGUF nor"),
    "noise": (b"\x89PNG\r\n\x1a\n" * 9, "neither GGUF nor"),
    "another version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "a model": (gguf_bytes(0, [text("general.type") + struct.pack("<I", 8) + text("model")]), "type model"),
    "no type": (gguf_bytes(0, []), "type None"),
    "no tensors": (gguf_bytes(0, [KIND]), "no entries"),
    "2^60 tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors"),
    "an array of 2^60 numbers": (gguf_bytes(0, [text("a") + struct.pack("<IIQ", 9, 4, 1 << 60)]), "promised"),
    "an array of 2^60 texts": (gguf_bytes(0, [text("a") + struct.pack("<IIQ", 9, 8, 1 << 60)]), "texts"),
    "an array of arrays": (gguf_bytes(0, [text("a") + struct.pack("<IIQ", 9, 9, 1)]), "type 9"),
    "an unknown type": (gguf_bytes(0, [text("a") + struct.pack("<I", 77)]), "type 77"),
    "alignment 0": (
        gguf_bytes(0, [KIND, text("general.alignment") + struct.pack("<II", 4, 0)]),
        "alignment is 0",
    ),
    "no UTF-8": (gguf_bytes(0, [struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<I", 4)]), "not UTF-8"),
    "a tensor beyond the end": (
        gguf_bytes(1, [KIND], text("x.in_sum2") + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0)),
        "cut short",
    ),
    "sums without counts": (
        gguf_bytes(1, [KIND], text("x.in_sum2") + struct.pack("<IQIQ", 1, 4, 0, 0) + bytes(64)),
        "4 sums and 0 counts",
    ),
    "half precision": (
        gguf_bytes(1, [KIND], text("x.counts") + struct.pack("<IQIQ", 1, 4, 1, 0)) + bytes(99),
        "type F16",
    ),
    "nine dimensions": (gguf_bytes(1, [KIND], text("x.counts") + struct.pack("<I", 9)), "9 dimensions"),
    "2^31 - 1 entries": (struct.pack("<i", 2**31 - 1) + bytes(64), "neither GGUF nor"),
    "a name of minus one byte": (struct.pack("<ii", 1, -1) + bytes(64), "-1 bytes"),
    "no values": (struct.pack("<ii", 1, 1) + b"x" + struct.pack("<ii", 1, 0), "0 values"),
    "a control character": (struct.pack("<ii", 1, 2) + b"\x1b[" + struct.pack("<2if", 1, 1, 1.0), r"\x1b["),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_files_end_in_a_sentence(model: Model, tmp_path: Path, name: str) -> None:
    data, expected = HOSTILE[name]
    path = tmp_path / "imatrix"
    path.write_bytes(data)
    assert expected in refusal(model, path)


def test_a_tensor_that_is_there_twice_is_refused(model: Model, tmp_path: Path) -> None:
    tensor = text("x.in_sum2") + struct.pack("<IQIQ", 1, 4, 0, 0)
    path = tmp_path / "imatrix"
    path.write_bytes(gguf_bytes(2, [KIND], tensor + tensor + bytes(64)))
    assert "the tensor x.in_sum2 twice" in refusal(model, path)
    entry = struct.pack("<i", 1) + b"x" + struct.pack("<2if", 1, 1, 1.0)
    path.write_bytes(struct.pack("<i", 2) + entry + entry)
    assert "expected one such entry" in refusal(model, path)


def test_files_of_other_kinds_are_refused(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"x": ("F32", (1,), bytes(4))})
    refusal(model, path)
    path = tmp_path / "folder"
    path.mkdir()
    assert "cannot be read (Is a directory)" in refusal(model, path)
    assert "cannot be read (No such file or directory)" in refusal(model, tmp_path / "nothing")


def shared_counts(num_pairs: int, num_counts: int, count: float = 1.0) -> bytes:
    """A GGUF file whose tensors, two for each of `num_pairs` entries, all name the same `num_counts` numbers."""
    described = struct.pack("<IQIQ", 1, num_counts, 0, 0)
    names = [f"{pair}{end}" for pair in range(num_pairs) for end in (".in_sum2", ".counts")]
    head = gguf_bytes(len(names), [KIND], b"".join(text(name) + described for name in names))
    return head + bytes(-len(head) % 32) + struct.pack("<f", count) * num_counts


def test_entries_that_share_their_bytes_take_no_memory_of_their_own(tmp_path: Path) -> None:
    """Kept as numbers of Python, these counts took a hundred times the file."""
    path = tmp_path / "imatrix"
    path.write_bytes(shared_counts(500, 4096))
    tracemalloc.start()
    try:
        found = open_imatrix(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.entries) == 500
    assert peak_bytes < 2 << 20
    assert (found.read("499") == 1).all()


@pytest.mark.parametrize("count", [np.nan, np.inf, -1.0])
def test_counts_that_are_no_numbers_of_tokens_are_refused(tmp_path: Path, count: float) -> None:
    path = tmp_path / "imatrix"
    path.write_bytes(shared_counts(1, 4, count))
    with pytest.raises(ColdpressError, match="the counts of 0 are not valid numbers of tokens"):
        open_imatrix(path).read("0")
