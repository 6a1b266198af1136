"""Array files written and read by rows: the same bytes as the ordinary ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compiler._io import array_file, checked_path, load_arrays, save_arrays, sha256_of
from compiler.activity.array_rows import RowReader, writing_rows
from schemas.base import ArrayFile
from schemas.errors import ColdpressError

ARRAYS = {
    "b": np.arange(60, dtype=np.float16).reshape(20, 3),
    "a": np.arange(20, dtype=np.float64),
    "c": np.arange(40, dtype=np.uint16).reshape(20, 2, 1),
    "d": np.arange(20, dtype=np.int64).reshape(5, 4),
    "e": np.arange(7, dtype=np.uint8),
    "f": np.arange(6, dtype=np.uint32),
}
SPECS = {name: (array.dtype.name, array.shape) for name, array in ARRAYS.items()}


@pytest.mark.parametrize("fingerprint", ["", "of inputs"])
def test_the_bytes_are_those_of_any_array_file(tmp_path: Path, fingerprint: str) -> None:
    with writing_rows(tmp_path / "rows.safetensors", SPECS, fingerprint) as writer:
        for name, array in ARRAYS.items():
            for start in reversed(range(0, len(array), 3)):  # in any order
                writer.write(name, start, array[start : start + 3])
        assert not (tmp_path / "rows.safetensors").exists()
    whole = save_arrays(tmp_path / "whole.safetensors", ARRAYS, fingerprint)
    assert sha256_of(tmp_path / "rows.safetensors") == whole.sha256


def test_rows_are_read_where_they_lie(tmp_path: Path) -> None:
    saved = save_arrays(tmp_path / "whole.safetensors", ARRAYS)
    with RowReader(checked_path(saved)) as reader:
        assert reader.shapes() == {name: array.shape for name, array in ARRAYS.items()}
        assert {name: reader.dtype(name) for name in ARRAYS} == {
            name: array.dtype.name for name, array in ARRAYS.items()
        }
        found = reader.read("c", 4, np.empty((5, 2, 1), np.uint16))
        assert np.array_equal(found, ARRAYS["c"][4:9])
        with pytest.raises(ColdpressError, match="truncated while it was read"):
            reader.read("a", 10**6, np.empty(1))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("load", [load_arrays, lambda file: load_arrays(file, "a"), checked_path])
def test_a_flipped_bit_is_refused_on_load(tmp_path: Path, load: Callable[[ArrayFile], object]) -> None:
    """The bit is in the last array, which the second case does not even ask for."""
    saved = save_arrays(tmp_path / "stage" / "whole.safetensors", ARRAYS)
    load(saved)
    flip(Path(saved.array_file), -1)
    expected = r"whole.safetensors: the sha256 begins .* damaged or changed .*; delete it and stage.json beside"
    with pytest.raises(ColdpressError, match=expected):
        load(saved)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    saved = save_arrays(tmp_path / "stage" / "whole.safetensors", ARRAYS)
    Path(saved.array_file).unlink()
    with pytest.raises(ColdpressError, match=r"arrays of a finished stage cannot .* delete it and stage.json"):
        load_arrays(saved)


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_arrays(tmp_path / "whole.safetensors", ARRAYS)
    monkeypatch.setattr("compiler._io.sha256_of", lambda path: pytest.fail(f"{path} is hashed again"))
    load_arrays(saved, "a")
    load_arrays(saved)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing_rows(tmp_path / "rows.safetensors", SPECS, "") as writer:
        writer.write("a", 0, ARRAYS["a"] / (1 // 0))
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_write(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    with writing_rows(path, {"a": ("uint8", (0, 4))}, ""):
        pass
    assert load_arrays(array_file(path))["a"].shape == (0, 4)
