"""package: how files are written, and records that it refuses to put together."""

import errno
import hashlib
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler import io
from coldpress.compiler.io import load_arrays, save_arrays
from coldpress.compiler.stages.package import flash, hashing
from coldpress.compiler.stages.package.hashing import HashingFile
from coldpress.compiler.stages.package.mapped import MappedArray
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.manifest import FLASH_FILE, MANIFEST_FILE
from tests.support.records import Build, contents
from tests.support.tiny import tiny_spec


def test_tensors_begin_on_multiples_of_their_elements(tmp_path):
    build = Build(tmp_path, spec=tiny_spec(vocab_size=383, hidden_size=48, head_dim=12, rotary_dim=12))
    build.package()
    data = (build.artifact / "resident.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    sizes = {"F32": 4, "F16": 2, "U8": 1}
    assert length % 8 == 0
    assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())


def test_same_records_same_bytes_in_any_folder_and_chunking(tmp_path, monkeypatch):
    first = Build(tmp_path / "a", method="predictor", layers_per_job=2)
    second = Build(tmp_path / "some" / "other place", method="predictor", layers_per_job=1)
    first.package()
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 65536)
    identity = second.package(order=second.order[::-1], quantized=second.quantized[::-1]).manifest_sha256
    assert contents(first.artifact) == contents(second.artifact)
    assert identity == hashlib.sha256((first.artifact / MANIFEST_FILE).read_bytes()).hexdigest()
    everything = b"".join(path.read_bytes() for path in first.artifact.rglob("*") if path.is_file())
    assert str(tmp_path).encode() not in everything


@pytest.mark.parametrize("block_bytes", [65536, 8 << 20])
def test_units_longer_than_what_is_left_of_a_block_are_cut_and_joined(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(hashing, "BLOCK_BYTES", block_bytes)
    spec = tiny_spec(intermediate_size=1100, num_hidden_layers=1)
    build = Build(tmp_path, method="dense", format_name="fp16", spec=spec)  # 384 bytes a unit: 65536 is no multiple
    build.package()
    codes = load_arrays(build.quantized[0].layers[0].arrays)["units.neuron"]
    order = load_arrays(build.order[0].entries[0].arrays)["order"]
    image = np.fromfile(build.artifact / FLASH_FILE, np.uint8)
    assert np.array_equal(image[: codes.size].reshape(codes.shape), codes[order])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 65535, 65536, 65537, 5 * 65536 + 4097])
def test_a_file_is_what_was_appended_with_its_digest(tmp_path, monkeypatch, size, direct):
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 65536)
    if not direct:
        refuse_direct_writes(monkeypatch)
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    seen: list[np.ndarray] = []
    file = HashingFile(tmp_path / "file", lambda block: seen.append(block.copy()))
    for part in np.array_split(data, 7):
        file.write(part)
    assert file.finish() == hashlib.sha256(data).hexdigest()
    file.close()
    assert file.size_bytes == size
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert np.array_equal(np.concatenate([*seen, np.empty(0, np.uint8)]), data)


def refuse_direct_writes(monkeypatch) -> None:
    """As a file system that cannot write around the page cache."""
    real = os.open

    def refusing(path, flags, *arguments, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *arguments, **named)

    monkeypatch.setattr(os, "open", refusing)


def test_a_write_that_takes_less_than_it_was_given_goes_on(tmp_path, monkeypatch):
    """As near the end of a disk's room, or where a signal comes."""
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 65536)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, place: whole(descriptor, data[:8192], place))
    data = np.random.default_rng(3).integers(0, 256, 3 * 65536 + 5000, np.uint8)
    file = HashingFile(tmp_path / "file")
    file.write(data)
    assert file.finish() == hashlib.sha256(data).hexdigest()
    file.close()
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_a_file_that_is_cut_while_it_is_read_is_told(tmp_path):
    """The system would end the process for touching what is gone."""
    units = np.arange(64 * 4096, dtype=np.uint32).view(np.uint8).reshape(-1, 4096)
    source = save_arrays(tmp_path / "codes.safetensors", {"units": units})
    mapped, file = MappedArray(source, "units"), HashingFile(tmp_path / "image")
    os.truncate(source.array_file, 8192)
    try:
        for reads in (
            lambda: mapped.values,
            lambda: flash._append_units(file, (mapped,), np.arange(len(units), dtype=np.int32)),
            lambda: mapped.copied(1),
        ):
            with pytest.raises(ColdpressError, match=r"codes\.safetensors: the file has 8192 bytes and had 10\d{5} "):
                reads()
        with pytest.raises(ColdpressError, match="damaged or changed after its stage ended"):
            MappedArray(source, "units")
    finally:
        file.close()


def test_a_file_that_is_exchanged_while_it_is_opened_is_not_read(tmp_path, monkeypatch):
    """What is mapped is the file that was held against the record."""
    source = save_arrays(tmp_path / "codes.safetensors", {"units": np.zeros((4, 4096), np.uint8)})
    other = save_arrays(tmp_path / "other.safetensors", {"units": np.ones((4, 4096), np.uint8)})
    real = os.open

    def exchanging(path, *rest, **more):
        opened = real(path, *rest, **more)
        if str(path) == source.array_file:
            os.replace(other.array_file, source.array_file)
        return opened

    monkeypatch.setattr(os, "open", exchanging)
    with pytest.raises(ColdpressError, match="damaged or changed after its stage ended"):
        MappedArray(source, "units")


def test_arrays_that_the_system_refuses_are_told(tmp_path, monkeypatch):
    """The library tells of it in words, without a number."""
    source = save_arrays(tmp_path / "stage" / "arrays.safetensors", {"units": np.zeros(4)})

    def refuse(*_, **__):
        raise PermissionError("Permission denied (os error 13)")

    monkeypatch.setattr(io, "safe_open", refuse)
    with pytest.raises(ColdpressError, match=r"arrays\.safetensors: cannot read .* \(Permission denied .*build again"):
        load_arrays(source)


def test_a_failed_write_ends_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 65536)

    def full(descriptor, data, place):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    file = HashingFile(tmp_path / "file")
    with pytest.raises(OSError, match="No space left"):
        file.write(np.zeros(2 * hashing.NUM_BLOCKS * 65536, np.uint8))
    file.close()


def test_records_that_do_not_belong_together(tmp_path):
    build = Build(tmp_path, method="predictor", layers_per_job=1)
    wrong = build.predictors.model_copy(update={"weights_sha256": "f" * 64})
    bad_plan = build.plans.plans[0].model_copy(update={"resident_bytes": 5})
    doubled = build.order[0].entries[0]
    same = np.zeros(72, np.int32)
    arrays = save_arrays(tmp_path / "same.safetensors", {"order": same})
    no_permutation = build.order[0].model_copy(update={"entries": (doubled.model_copy(update={"arrays": arrays}),)})
    for changes, text in (
        ({"quantized": build.quantized[:1]}, r"cover layers \[0\] and 1 of them"),
        ({"quantized": (*build.quantized, build.quantized[1])}, r"cover layers \[0, 1, 1\]"),
        (
            {"quantized": Build(tmp_path / "b", method="predictor", format_name="fp16").quantized},
            "the format int8_group32",
        ),
        ({"quantized": Build(tmp_path / "c").quantized}, "units.neuron"),
        ({"predictors": wrong}, "the predictors belong to weights ffffffffffff"),
        ({"order": build.order[:1]}, "no order for layer 1, family neuron"),
        ({"order": (no_permutation, build.order[1])}, "the order is no permutation of 72 units"),
        ({"plans": build.plans.model_copy(update={"plans": (bad_plan,)})}, r"plans\[0\]\.resident_bytes is 5"),
    ):
        with pytest.raises(ColdpressError, match=text):
            build.package(**changes)
        assert not build.artifact.exists()
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("place", ["layers", "shared"])
def test_codes_that_were_damaged_between_stages_are_not_published(tmp_path, place):
    build = Build(tmp_path)
    quantized = build.quantized[0]
    source = quantized.shared if place == "shared" else quantized.layers[1].arrays
    assert source is not None
    data = bytearray(Path(source.array_file).read_bytes())
    data[-1] ^= 1
    Path(source.array_file).write_bytes(data)
    with pytest.raises(ColdpressError, match=f"{Path(source.array_file).name}: the sha256 begins with"):
        build.package()
    assert not build.artifact.exists()


def test_a_system_that_gives_no_thread_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    file = HashingFile(tmp_path / "flash.img")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    file.write(b"data")
    with pytest.raises(ColdpressError, match=r"flash\.img cannot be written: .* \(can't start new thread\); free some"):
        file.finish()
    monkeypatch.undo()
    file.close()
