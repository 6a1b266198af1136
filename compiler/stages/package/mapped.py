"""Array files of earlier stages as they lie in the page cache: what is copied from them is copied once.

Mapped pages count as the process's memory, so they are given back on the way; how large an array is does not matter.
A file that is to be read next is asked for ahead, in one piece, since units are taken from it in flash order. What is
mapped is what was held against the record: one open file, of that size. Touching mapped bytes that a file has lost ends
a process by a signal, so its size is asked again before each block: only a file that is cut short while that block is
being copied, some milliseconds, could still do so. Reading units one by one, which could not, takes four times as long.
"""

import math
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from coldpress.compiler.checkpoint.headers import read_header
from coldpress.compiler.io import checked_path, naming
from coldpress.runtime.artifact.tensor_files import numpy_dtype
from coldpress.runtime.artifact.tensor_header import TensorEntry
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.errors import CheckpointError, ColdpressError

ASK_BYTES = 128 << 10
"""Linux reads no more ahead at one request than the device's read-ahead, by default this."""
RELEASE_BYTES = 128 << 20
"""Bytes read before pages are given back: more often costs time, since units that are read later share pages."""


class MappedArray:
    """One array of a file, read only."""

    def __init__(self, source: ArrayFile, name: str) -> None:
        """Maps the file; its content is read only to be held against its record, once.

        Raises:
            ColdpressError: if the file is missing or damaged, or has no such array.
        """
        self._path = Path(source.array_file)
        self._file = _opened(self._path)
        weakref.finalize(self, os.close, self._file)
        with naming(self._path):
            self._size_bytes = os.fstat(self._file).st_size
            checked_path(source)
            if not os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                raise self._changed()
            entry = self._entry(name)
            self._map = mmap.mmap(self._file, self._size_bytes, prot=mmap.PROT_READ)
        values = np.frombuffer(self._map, numpy_dtype(entry), math.prod(entry.shape), entry.start_bytes)
        self._values = values.reshape(entry.shape)
        self._copied_bytes = 0

    @property
    def values(self) -> np.ndarray:
        """The array, of a file that still has its size; valid as long as this object is kept or it is.

        Raises:
            ColdpressError: if the file is shorter or longer by now.
        """
        if os.fstat(self._file).st_size != self._size_bytes:
            raise self._changed()
        return self._values

    def ask(self) -> None:
        """Has the system read the file into the page cache; for a thread of its own, since it may wait for the disk."""
        if hasattr(os, "posix_fadvise"):
            for start in range(0, self._size_bytes, ASK_BYTES):
                os.posix_fadvise(self._file, start, ASK_BYTES, os.POSIX_FADV_WILLNEED)

    def copied(self, num_bytes: int) -> None:
        """Says that so many bytes have been read; now and then, gives the pages that hold them back.

        Raises:
            ColdpressError: as `values`, before more is read.
        """
        self._copied_bytes += num_bytes
        if self._copied_bytes >= RELEASE_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._copied_bytes = 0
        _ = self.values

    def _entry(self, name: str) -> TensorEntry:
        try:
            return read_header(self._path)[name]
        except (CheckpointError, KeyError) as error:
            raise ColdpressError(
                f"{self._path}: cannot read the array {name} of a finished stage ({error}); delete the file and rebuild"
            ) from error

    def _changed(self) -> ColdpressError:
        return ColdpressError(
            f"{self._path}: the file has {os.fstat(self._file).st_size} bytes and had {self._size_bytes} when it was "
            f"held against its record: another program changes it; end that, delete {self._path.parent}.json, then "
            "build again"
        )


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ColdpressError(
            f"{path}: a file of a finished stage cannot be read ({error.strerror}); delete {path.parent}.json, then "
            "build again"
        ) from error
