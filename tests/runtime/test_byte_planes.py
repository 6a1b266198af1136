"""Compressed arrays come back as they were, damaged ones not at all, and 16-bit numbers lose more than half."""

from pathlib import Path

import numpy as np
import pytest
import zstandard

from coldpress.compiler.io import PACKED, Workspace, load_arrays
from coldpress.runtime.artifact.byte_planes import pack, unpack
from coldpress.schemas.errors import ColdpressError


@pytest.mark.parametrize("data", [b"", b"a", b"abc", bytes(range(256)) * 3])
def test_what_was_packed_comes_back(data: bytes) -> None:
    assert unpack(pack(data)) == data


def test_numbers_take_less_than_zstandard_alone_makes_of_them() -> None:
    """Of signals with five bits of mantissa, as a trace keeps them."""
    codes = np.random.default_rng(0).normal(size=1 << 16).astype(np.float16).view(np.uint16)
    data = (codes & 0xFFE0).tobytes()
    assert len(pack(data)) < 0.95 * len(zstandard.ZstdCompressor(level=19).compress(data))


@pytest.mark.parametrize("packed", [b"", b"no", pack(b"abcdef" * 9)[:-3]])
def test_what_is_not_compressed_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="not compressed by zstandard"):
        unpack(packed)


def test_a_compressed_file_is_kept_as_others_are(tmp_path: Path) -> None:
    """Under its own name, found again by a run of the same inputs, and refused if it was changed."""
    arrays = {"a": np.arange(5, dtype=np.float16), "b": np.eye(3, dtype=np.int32)}
    work = Workspace(tmp_path, "inputs")
    file = work.once(f"trace{PACKED}", lambda: arrays)
    assert file == Workspace(tmp_path, "inputs").once(f"trace{PACKED}", lambda: pytest.fail("it is there"))
    assert Path(file.array_file).name == "trace.safetensors.zst"
    found = load_arrays(file)
    assert found.keys() == arrays.keys()
    assert all(
        np.array_equal(found[name], array) and found[name].dtype == array.dtype for name, array in arrays.items()
    )
    assert load_arrays(file, "b").keys() == {"b"}
    with pytest.raises(ColdpressError, match="cannot read the arrays of a finished stage"):
        load_arrays(file, "c")
    path = Path(file.array_file)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ColdpressError, match="the sha256 begins with"):
        load_arrays(file)
