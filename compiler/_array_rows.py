"""Array files of which only some rows are in memory: hidden states and inputs of all calibration tokens.

The format is that of compiler/_io.py's array files (safetensors, at most one metadata key), byte for byte; rows are
written and read where they lie, by several threads at once.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from compiler._io import FINGERPRINT_KEY, replacing
from compiler._safetensors import TensorEntry, read_header
from schemas.errors import ColdpressError

CODES = {"int64": "I64", "float64": "F64", "uint32": "U32", "float16": "F16", "uint16": "U16", "uint8": "U8"}
"""safetensors' codes of dtypes, in the order in which it lays out arrays."""
Specs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Array name -> numpy's name of the dtype, and the shape."""


class RowWriter:
    """An array file being written; every row has to be written once."""

    def __init__(self, descriptor: int, entries: Mapping[str, TensorEntry]) -> None:
        self._descriptor, self._entries = descriptor, entries

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Writes rows [n, …] of the array `name` from row `start` on; their dtype is the array's."""
        entry = self._entries[name]
        place = entry.start_bytes + start * _row_bytes(entry)
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        while data:
            count = os.pwrite(self._descriptor, data, place)
            data, place = data[count:], place + count


@contextmanager
def writing_rows(path: Path, specs: Specs, fingerprint: str) -> Iterator[RowWriter]:
    """Yields the writer of a new array file at `path`, which is there, synced, once the block ends well."""
    header, entries = _header(specs, fingerprint)
    with replacing(path) as temporary:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, header, 0)
            os.truncate(descriptor, max([len(header), *(entry.stop_bytes for entry in entries.values())]))
            yield RowWriter(descriptor, entries)
        finally:
            os.close(descriptor)


class RowReader:
    """An array file whose rows are read as they are needed."""

    def __init__(self, path: str) -> None:
        self._entries = read_header(Path(path))
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, name: str, start: int, into: np.ndarray) -> np.ndarray:
        """Fills contiguous `into` [n, …], of the array's dtype, with the rows from `start` on; gives it back.

        Raises:
            ColdpressError: if the file ends before.
        """
        entry = self._entries[name]
        place = entry.start_bytes + start * _row_bytes(entry)
        data = into.reshape(-1).view(np.uint8).data
        while data:
            count = os.preadv(self._descriptor, [data], place)
            if count == 0:
                raise ColdpressError(f"{self._path}: truncated while it was read; delete the file and rebuild")
            data, place = data[count:], place + count
        return into

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array."""
        return self._entries[name].shape

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def dtype(self, name: str) -> str:
        """numpy's name of an array's dtype."""
        return next(dtype for dtype, code in CODES.items() if code == self._entries[name].dtype)

    def __enter__(self) -> "RowReader":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _row_bytes(entry: TensorEntry) -> int:
    return (entry.stop_bytes - entry.start_bytes) // max(1, entry.shape[0])


def _header(specs: Specs, fingerprint: str) -> tuple[bytes, dict[str, TensorEntry]]:
    """(the file's first bytes, where each array lies)."""
    placed: dict[str, tuple[int, int]] = {}
    end = 0
    for name in sorted(specs, key=lambda name: (list(CODES).index(specs[name][0]), name)):
        start, end = end, end + np.dtype(specs[name][0]).itemsize * math.prod(specs[name][1])
        placed[name] = (start, end)
    described = {
        name: {"dtype": CODES[specs[name][0]], "shape": list(specs[name][1]), "data_offsets": list(placed[name])}
        for name in placed
    }
    metadata = {"__metadata__": {FINGERPRINT_KEY: fingerprint}} if fingerprint else {}
    text = json.dumps(metadata | described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    entries = {
        name: TensorEntry(name, CODES[specs[name][0]], specs[name][1], base + start, base + stop)
        for name, (start, stop) in placed.items()
    }
    return len(text).to_bytes(8, "little") + text, entries
