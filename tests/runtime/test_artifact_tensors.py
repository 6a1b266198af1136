"""A tensor file that breaks its format, or has other tensors than the manifest says, is refused."""

import ctypes
import json
import mmap
import os

import numpy as np
import pytest

from coldpress.runtime.artifact import errors, tensor_files
from coldpress.runtime.artifact.reader import open_artifact
from tests.support.artifacts import (
    Recipe,
    build_artifact,
    change_arrays,
    change_manifest,
    refuse,
    small_spec,
)


def replace_header(path, change):
    """Rewrites resident.safetensors with the header text that `change` makes of the parsed one; sizes follow."""
    file = path / "resident.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(json.loads(data[8 : 8 + length]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    change_manifest(path, lambda manifest: None, relist=True)


def tensor(header, **changes):
    return header | {"norm.weight": header["norm.weight"] | changes}


HEADER_CASES = {
    "twice": (lambda h: json.dumps(h)[:-1].encode() + b', "norm.weight": 1}', "'norm.weight' twice"),
    "no object": (lambda h: b"[1]", "first byte"),
    "blank first": (lambda h: b" " + json.dumps(h).encode(), "first byte"),
    "name": (lambda h: h | {"../x": h["norm.weight"]}, "'../x'"),
    "nul": (lambda h: h | {"a\0b": h["norm.weight"]}, "name"),
    "long name": (lambda h: h | {"a" * 201: h["norm.weight"]}, "name"),
    "no name": (lambda h: h | {"": h["norm.weight"]}, "name"),
    "field": (lambda h: tensor(h, extra=1), "tensor norm.weight is {"),
    "no tensor": (lambda h: h | {"norm.weight": 3}, "tensor norm.weight is 3"),
    "dtype": (lambda h: tensor(h, dtype="F4"), "'F4'"),
    "dtype kind": (lambda h: tensor(h, dtype=["F32"]), "dtype"),
    "shape": (lambda h: tensor(h, shape=[-64]), "[-64]"),
    "shape kind": (lambda h: tensor(h, shape=[64.0]), "[64.0]"),
    "shape size": (lambda h: tensor(h, shape=[2**40, 2**40]), "data_offsets"),
    "empty": (lambda h: tensor(h, shape=[0]), "[0]"),
    "dimensions": (lambda h: tensor(h, shape=[64, 1, 1, 1, 1]), "shape"),
    "offsets": (lambda h: tensor(h, data_offsets=[0]), "data_offsets"),
    "negative": (lambda h: tensor(h, data_offsets=[-256, 0]), "data_offsets"),
    "overlap": (lambda h: tensor(h, data_offsets=[4, 260]), "overlapping the one before it by"),
    "metadata": (lambda h: h | {"__metadata__": {"a": 1}}, "__metadata__"),
    "more metadata": (lambda h: h | {"__metadata__": {"a": "1", "b": "2"}}, "an object of texts, at most 1;"),
    "missing": (lambda h: {name: h[name] for name in h if name != "norm.weight"}, "expected"),
}


@pytest.mark.parametrize("case", HEADER_CASES)
def test_a_tensor_file_that_breaks_its_format_is_refused(path, case):
    change, words = HEADER_CASES[case]
    replace_header(path, change)
    refuse(path, errors.TensorFileError, "resident.safetensors", words)


@pytest.mark.parametrize("length", [0, 1, 2**63, 17 << 20, 10**9])
def test_a_header_length_out_of_bounds_is_refused(path, length):
    file = path / "resident.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    refuse(path, errors.TensorFileError, "resident.safetensors: the header length", str(length))


def test_trailing_bytes_and_tiny_files_are_refused(path):
    file = path / "resident.safetensors"
    file.write_bytes(file.read_bytes() + bytes(8))
    change_manifest(path, lambda manifest: None, relist=True)
    refuse(path, errors.TensorFileError, "where the last tensor ends")
    file.write_bytes(bytes(4))
    change_manifest(path, lambda manifest: None, relist=True)
    refuse(path, errors.TensorFileError, "4 bytes", "at least 8")


def test_tensors_other_than_the_manifests_are_refused(path):
    change_arrays(path, "resident.safetensors", lambda arrays: arrays.update(extra=np.zeros(2, np.float32)))
    refuse(path, errors.TensorFileError, "'extra'", "only what the manifest names")


def test_a_tensor_of_another_shape_or_type_is_refused(path):
    def reshape(arrays):
        arrays["norm.weight"] = arrays["norm.weight"].reshape(8, 8)

    change_arrays(path, "resident.safetensors", reshape)
    refuse(path, errors.TensorFileError, "'norm.weight'", "float32 [8, 8]", "float32 [64]")


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "value"), [(0, -1.0), (2, -1.0), (3, 5.0), (3, -0.5)])
def test_what_a_selector_keeps_out_of_its_bounds_is_refused(tmp_path, entry, value):
    spec = small_spec(num_hidden_layers=2, intermediate_size=64)
    path = build_artifact(tmp_path / "a", Recipe(spec=spec, method="flash")).path

    def change(arrays):
        arrays["selector.0.1.mlp_in.read_units"][entry] = value

    change_arrays(path, "tables.safetensors", change)
    refuse(path, errors.TableError, "selector.0.1.mlp_in.read_units", f"{value:g}", "0 to 1")


def cached_pages(path):
    """Returns how many of a file's pages are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as pages:
        found = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        held = ctypes.c_char.from_buffer(pages)
        try:
            address = ctypes.c_void_p(ctypes.addressof(held))
            assert libc.mincore(address, ctypes.c_size_t(len(pages)), found) == 0, os.strerror(ctypes.get_errno())
        finally:
            del held
    return sum(byte & 1 for byte in found)


def test_memory_holds_weights_once(tmp_path, monkeypatch):
    """Not in the page cache besides, where they would be outside the DRAM budget; in portions, whatever their sizes."""
    path = build_artifact(tmp_path / "a", Recipe(spec=small_spec(vocab_size=4096))).path
    file = path / "resident.safetensors"
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # pages that are not on disk stay
        opened.read()
    assert cached_pages(file) > 100
    expected = open_artifact(path).resident
    assert cached_pages(file) == 0
    monkeypatch.setattr(tensor_files, "PORTION_BYTES", 1000)
    found = open_artifact(path).resident
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[role], values) for role, values in expected.items())
