"""Array files written and read by rows: the same bytes as the ordinary ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.activity.array_rows import RowReader, row_checksums, writing_rows
from coldpress.compiler.io import (
    Workspace,
    array_file,
    checked_path,
    load_arrays,
    load_record,
    save_arrays,
    save_record,
    sha256_of,
)
from coldpress.runtime.artifact.tensor_files import NUMPY_NAMES
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.errors import ColdpressError

ARRAYS = {
    "b": np.arange(60, dtype=np.float16).reshape(20, 3),
    "a": np.arange(20, dtype=np.float64),
    "c": np.arange(40, dtype=np.uint16).reshape(20, 2, 1),
    "d": np.arange(20, dtype=np.int64).reshape(5, 4),
    "e": np.arange(7, dtype=np.uint8),
    "f": np.arange(6, dtype=np.uint32),
}
SPECS = {name: (array.dtype.name, array.shape) for name, array in ARRAYS.items()}


def test_the_bytes_are_those_of_any_array_file(tmp_path: Path) -> None:
    with writing_rows(tmp_path / "rows.safetensors", SPECS) as writer:
        for name, array in ARRAYS.items():
            for start in reversed(range(0, len(array), 3)):  # in any order
                writer.write(name, start, array[start : start + 3])
        assert not (tmp_path / "rows.safetensors").exists()
    whole = save_arrays(tmp_path / "whole.safetensors", ARRAYS)
    assert sha256_of(tmp_path / "rows.safetensors") == whole.sha256


def test_rows_are_read_where_they_lie(tmp_path: Path) -> None:
    saved = save_arrays(tmp_path / "whole.safetensors", ARRAYS)
    with RowReader(checked_path(saved)) as reader:
        assert {name: (NUMPY_NAMES[entry.dtype], entry.shape) for name, entry in reader.entries.items()} == {
            name: (array.dtype.name, array.shape) for name, array in ARRAYS.items()
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
    expected = r"whole.safetensors: the sha256 begins .* damaged or changed .*; delete .*/stage.json, then build"
    with pytest.raises(ColdpressError, match=expected):
        load(saved)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    saved = save_arrays(tmp_path / "stage" / "whole.safetensors", ARRAYS)
    Path(saved.array_file).unlink()
    with pytest.raises(ColdpressError, match=r"a file of a finished stage cannot .* delete .*/stage.json"):
        load_arrays(saved)


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_arrays(tmp_path / "whole.safetensors", ARRAYS)
    monkeypatch.setattr("coldpress.compiler.io.sha256_of", lambda path: pytest.fail(f"{path} is hashed again"))
    load_arrays(saved, "a")
    load_arrays(saved)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing_rows(tmp_path / "rows.safetensors", SPECS) as writer:
        writer.write("a", 0, ARRAYS["a"] / (1 // 0))
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_write(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    with writing_rows(path, {"a": ("uint8", (0, 4))}):
        pass
    assert load_arrays(array_file(path))["a"].shape == (0, 4)


def test_rows_with_checksums_are_held_against_them(tmp_path: Path) -> None:
    rows = ARRAYS["c"]
    sums = row_checksums(rows)
    path = save_arrays(tmp_path / "rows.safetensors", {"rows": rows, "sums": sums}).array_file
    with RowReader(Path(path)) as reader:
        assert np.array_equal(reader.read_checked("rows", "sums", 3, np.empty((5, 2, 1), np.uint16)), rows[3:8])
    flip(Path(path), Path(path).read_bytes().index(rows[4].tobytes()))
    with RowReader(Path(path)) as reader:
        reader.read_checked("rows", "sums", 5, np.empty((15, 2, 1), np.uint16))
        with pytest.raises(
            ColdpressError, match=r"rows.safetensors: row 4 does not have its checksum; delete the file"
        ):
            reader.read_checked("rows", "sums", 3, np.empty((5, 2, 1), np.uint16))


def test_what_an_interrupted_run_left_is_taken_only_if_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = Workspace(tmp_path, "inputs")
    first = work.once("a", lambda: ARRAYS)
    assert work.once("a", lambda: pytest.fail("made again")) == first
    flip(work.path("a"), -1)
    assert work.once("a", lambda: ARRAYS) == first
    assert "a.safetensors: damaged since an interrupted run wrote it; it is made again" in caplog.text
    flip(tmp_path / "a.done.json", -9)
    with pytest.raises(ColdpressError, match=r"a.done.json: the sha256 of the record begins .*; delete .*, then build"):
        work.once("a", lambda: ARRAYS)


def test_another_run_takes_nothing(tmp_path: Path) -> None:
    Workspace(tmp_path, "inputs").once("a", lambda: ARRAYS)
    other = {"a": np.zeros(3)}
    made = Workspace(tmp_path, "other inputs").once("a", lambda: other)
    assert np.array_equal(load_arrays(made)["a"], other["a"])


@pytest.mark.slow
def test_no_flipped_bit_of_a_record_passes(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    record = ArrayFile(array_file=str(tmp_path / "x.safetensors"), sha256="0" * 64)
    save_record(record, path)
    assert load_record(path, ArrayFile) == record
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        with pytest.raises(
            ColdpressError, match=r"file.json: the sha256 of the record .*; delete .*, then build again"
        ):
            load_record(path, ArrayFile)
