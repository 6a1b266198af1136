"""Maps array files of earlier stages, so that their bytes are copied only once, straight from the page cache.

Mapped pages count as the process's memory, so they are released on the way; the size of an array does not matter. The
next file is requested in one piece ahead of time, since its units are then taken in flash order. The mapped bytes are
those that were checked against the record: the same open file, of the recorded size. Touching mapped bytes beyond the
end of a shrunk file kills the process by a signal, so the size is checked again before each block; only a file that
shrinks in the milliseconds while that block is copied could still do it. Reading unit by unit would be safe but takes
four times as long.
"""

import math
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from coldpress.compiler.checkpoint.headers import read_header
from coldpress.compiler.io import checked_path, deletion, naming
from coldpress.runtime.artifact.tensor_files import numpy_dtype
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.errors import CheckpointError, ColdpressError

ASK_BYTES = 128 << 10
"""Bytes per read-ahead request: Linux caps each at the device's read-ahead, which is this by default."""
RELEASE_BYTES = 128 << 20
"""Bytes read before pages are released: more often costs time, since later units share the pages."""


class MappedArray:
    def __init__(self, source: ArrayFile, name: str) -> None:
        """Maps the file; reads its content once, only to check it against its record. Raises ColdpressError if it is
        missing or damaged, or lacks the array."""
        self._path = Path(source.array_file)
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ColdpressError(
                f"{self._path}: a file of a finished stage cannot be read ({error.strerror}); {self._remedy}"
            ) from error
        weakref.finalize(self, os.close, self._file)
        with naming(self._path):
            self._size_bytes = os.fstat(self._file).st_size
            checked_path(source)
            if not os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                raise self._changed()
            try:
                entry = read_header(self._path)[name]
            except (CheckpointError, KeyError) as error:
                raise ColdpressError(
                    f"{self._path}: cannot read the array {name} of a finished stage ({error}); delete the file and "
                    "rebuild"
                ) from error
            self._map = mmap.mmap(self._file, self._size_bytes, prot=mmap.PROT_READ)
        values = np.frombuffer(self._map, numpy_dtype(entry), math.prod(entry.shape), entry.start_bytes)
        self._values = values.reshape(entry.shape)
        self._copied_bytes = 0

    @property
    def _remedy(self) -> str:
        return f"{deletion(Path(f'{self._path.parent}.json'))}, then build again"

    @property
    def values(self) -> np.ndarray:
        """The array, valid while this object or the array itself is referenced. Raises ColdpressError if the file's
        size has changed."""
        if os.fstat(self._file).st_size != self._size_bytes:
            raise self._changed()
        return self._values

    def ask(self) -> None:
        """Reads the file into the page cache. Call it in a separate thread: it may wait for the disk."""
        if hasattr(os, "posix_fadvise"):
            for start in range(0, self._size_bytes, ASK_BYTES):
                os.posix_fadvise(self._file, start, ASK_BYTES, os.POSIX_FADV_WILLNEED)

    def copied(self, num_bytes: int) -> None:
        """Records that `num_bytes` more have been read; now and then releases the pages that hold them. Raises as
        `values`, before more is read."""
        self._copied_bytes += num_bytes
        if self._copied_bytes >= RELEASE_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._copied_bytes = 0
        _ = self.values

    def _changed(self) -> ColdpressError:
        return ColdpressError(
            f"{self._path}: the file has {os.fstat(self._file).st_size} bytes and had {self._size_bytes} when it was "
            f"checked against its record: another program changes it; end that, {self._remedy}"
        )
