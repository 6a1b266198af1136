"""Array files read and written by rows, too large for memory: hidden states and inputs of all calibration tokens.

The format is that of compiler/io.py's array files (safetensors), byte for byte. Several threads may read and write rows
in place at once.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from coldpress.compiler.checkpoint.headers import read_header
from coldpress.compiler.io import replacing
from coldpress.runtime import _native
from coldpress.runtime.artifact.tensor_files import CODES, TensorEntry, make_header
from coldpress.schemas.errors import ColdpressError

REMEDY = "delete the file, then build again"

Specs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Array name -> numpy's name of the dtype, and the shape."""


class RowWriter:
    """An array file in the making; every row must be written once."""

    def __init__(self, descriptor: int, entries: Mapping[str, TensorEntry]) -> None:
        self._descriptor, self._entries = descriptor, entries

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Writes rows [n, …] of the array `name` from row `start` on; they must have the array's dtype."""
        entry = self._entries[name]
        place = entry.start_bytes + start * _row_bytes(entry)
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        while data:
            count = os.pwrite(self._descriptor, data, place)
            data, place = data[count:], place + count


@contextmanager
def writing_rows(path: Path, specs: Specs) -> Iterator[RowWriter]:
    """Yields the writer of a new array file; it appears at `path`, synced, once the block ends without an error."""
    names = sorted(specs, key=lambda name: (list(CODES).index(specs[name][0]), name))
    header, entries = make_header((name, *specs[name]) for name in names)
    with replacing(path) as temporary:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, header, 0)
            os.truncate(descriptor, max([len(header), *(entry.stop_bytes for entry in entries.values())]))
            yield RowWriter(descriptor, entries)
        finally:
            os.close(descriptor)


def row_checksums(rows: np.ndarray) -> np.ndarray:
    """Returns the CRC32C of each of C-contiguous rows [n, …], uint32 [n]."""
    return _native.crc32c_pages(rows.reshape(-1).view(np.uint8), rows[0].nbytes)


class RowReader:
    def __init__(self, path: Path) -> None:
        self.entries = read_header(path)
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, name: str, start: int, into: np.ndarray) -> np.ndarray:
        """Fills contiguous `into` [n, …], of the array's dtype, with the rows from `start` on; returns it. Raises
        ColdpressError if the file ends before that."""
        entry = self.entries[name]
        place = entry.start_bytes + start * _row_bytes(entry)
        data = into.reshape(-1).view(np.uint8).data
        while data:
            count = os.preadv(self._descriptor, [data], place)
            if count == 0:
                raise ColdpressError(f"{self._path}: truncated while it was read; {REMEDY}")
            data, place = data[count:], place + count
        return into

    def read_checked(self, name: str, checksums: str, start: int, into: np.ndarray) -> np.ndarray:
        """Reads as `read` does, and checks each row against its `row_checksums` in the array named `checksums`; raises
        ColdpressError if the file is damaged or ends early."""
        if not {name, checksums} <= self.entries.keys():
            raise ColdpressError(f"{self._path}: damaged, found the arrays {list(self.entries)}; {REMEDY}")
        self.read(name, start, into)
        expected = self.read(checksums, start, np.empty(len(into), np.uint32))
        bad = np.flatnonzero(row_checksums(into) != expected)
        if bad.size:
            raise ColdpressError(f"{self._path}: row {start + bad[0]} does not have its checksum; {REMEDY}")
        return into

    def __enter__(self) -> "RowReader":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _row_bytes(entry: TensorEntry) -> int:
    return (entry.stop_bytes - entry.start_bytes) // max(1, entry.shape[0])
