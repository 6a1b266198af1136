"""Our own strict reading of safetensors headers, before any library or any offset is trusted; and their writing.

A file is: 8 bytes length n, n bytes of JSON, data. Here the tensors must tile the data exactly, in some order: no hole,
no overlap, nothing behind them; names must be plain, keys distinct, sizes equal shape times dtype (the format's own
README, and what libraries accept beyond it).
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compiler.checkpoint.source_json import parse_json
from schemas.errors import CheckpointError

MAX_HEADER_BYTES = 64 << 20
MAX_RANK = 8
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
CODES = {
    **{"int64": "I64", "float64": "F64", "float32": "F32", "uint32": "U32", "int32": "I32"},
    **{"float16": "F16", "uint16": "U16", "uint8": "U8"},
}
"""Codes of numpy's dtypes, in the order in which the safetensors library lays out arrays."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,511}")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: dtype code, shape, and where its bytes lie in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start_bytes: int
    stop_bytes: int


def make_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, TensorEntry]]:
    """(a file's first bytes, where each tensor lies) for tensors one behind another: name, numpy's dtype, shape."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    placed: list[TensorEntry] = []
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[CODES[dtype]]
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        placed.append(TensorEntry(name, CODES[dtype], shape, start, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    entries = {
        entry.name: replace(entry, start_bytes=base + entry.start_bytes, stop_bytes=base + entry.stop_bytes)
        for entry in placed
    }
    return len(text).to_bytes(8, "little") + text, entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name, in the order of their bytes.

    Raises:
        CheckpointError: naming the file, the tensor, what was found and what was expected.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror}); complete the checkpoint") from error
    return _read_header(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _read_header(path: Path, size_bytes: int, changed_ns: int) -> dict[str, TensorEntry]:
    place = path.name
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length < 2:
            raise CheckpointError(f"{place}: {size_bytes} bytes with a header of {length}, expected a safetensors file")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{place}: a header of {length} bytes, expected at most {MAX_HEADER_BYTES}")
        if length > size_bytes - 8:
            raise CheckpointError(f"{place}: truncated, a header of {length} bytes in a file of {size_bytes}")
        text = file.read(length)
    header = parse_json(text, f"{place} header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{place} header: a JSON {type(header).__name__}, expected an object")
    _check_metadata(place, header.pop("__metadata__", {}))
    entries = sorted(
        (_entry(place, name, value, 8 + length) for name, value in header.items()),
        key=lambda entry: (entry.start_bytes, entry.stop_bytes),
    )
    _check_tiling(place, entries, 8 + length, size_bytes)
    return {entry.name: entry for entry in entries}


def _check_metadata(place: str, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{place} header: __metadata__ that is no map of texts")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _entry(place: str, name: str, value: Any, data_start: int) -> TensorEntry:
    if not NAME.fullmatch(name) or ".." in name:
        raise CheckpointError(f"{place} header: the tensor name {name[:80]!r}, expected letters, digits, '_', '-', '.'")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{place}: tensor {name} is not described by dtype, shape and data_offsets alone")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{place}: tensor {name} has the unsupported dtype {dtype!r}; convert it to F16 or BF16")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_count, shape)):
        raise CheckpointError(f"{place}: tensor {name} has the shape {shape!r}, expected up to {MAX_RANK} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(f"{place}: tensor {name} has the data_offsets {offsets!r}, expected two offsets")
    start, stop = offsets
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if stop - start != expected:
        raise CheckpointError(
            f"{place}: tensor {name} spans {stop - start} bytes, expected {expected} for {dtype} {shape}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + stop)


def _check_tiling(place: str, entries: list[TensorEntry], data_start: int, size_bytes: int) -> None:
    end = data_start
    for entry in entries:
        if entry.start_bytes < end:
            raise CheckpointError(
                f"{place}: tensor {entry.name} overlaps the one before it by {end - entry.start_bytes} bytes, expected "
                "disjoint tensors"
            )
        if entry.start_bytes > end:
            raise CheckpointError(
                f"{place}: a hole of {entry.start_bytes - end} bytes before tensor {entry.name}, expected tensors "
                "without gaps"
            )
        end = entry.stop_bytes
    if end > size_bytes:
        raise CheckpointError(f"{place}: truncated, found {size_bytes} bytes, expected {end}; download it again")
    if end < size_bytes:
        raise CheckpointError(f"{place}: {size_bytes - end} bytes behind the last tensor, expected a file of {end}")
