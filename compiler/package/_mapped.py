"""Array files of earlier stages as they lie in the page cache: what is copied from them is copied once.

Mapped pages count as the process's memory, so they are given back on the way; how large an array is does not matter.
A file that is to be read next is asked for ahead, in one piece, since units are taken from it in flash order.
"""

import math
import mmap
import os
from pathlib import Path

import numpy as np

from compiler._io import checked_path
from compiler.checkpoint.headers import read_header
from runtime.artifact.tensor_files import numpy_dtype
from runtime.artifact.tensor_header import TensorEntry
from schemas.base import ArrayFile
from schemas.errors import CheckpointError, ColdpressError

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
        self._path = checked_path(source)
        entry = _entry(self._path, name)
        with self._path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        values = np.frombuffer(self._map, numpy_dtype(entry), math.prod(entry.shape), entry.start_bytes)
        self.values = values.reshape(entry.shape)
        """The array; valid as long as this object is kept or it is."""
        self._copied_bytes = 0

    def ask(self) -> None:
        """Has the system read the file into the page cache; for a thread of its own, since it may wait for the disk."""
        if hasattr(os, "posix_fadvise"):
            with self._path.open("rb") as file:
                for start in range(0, len(self._map), ASK_BYTES):
                    os.posix_fadvise(file.fileno(), start, ASK_BYTES, os.POSIX_FADV_WILLNEED)

    def copied(self, num_bytes: int) -> None:
        """Says that so many bytes have been read; now and then, gives the pages that hold them back."""
        self._copied_bytes += num_bytes
        if self._copied_bytes >= RELEASE_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._copied_bytes = 0


def _entry(path: Path, name: str) -> TensorEntry:
    try:
        return read_header(path)[name]
    except (CheckpointError, KeyError) as error:
        raise ColdpressError(
            f"{path}: cannot read the array {name} of a finished stage ({error}); delete the file and rebuild"
        ) from error
