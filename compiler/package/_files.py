"""Files of an artifact, written front to back once, with their size and digest taken on the way.

The digest runs in a thread of its own beside the write (both release the interpreter), a block behind: large files are
written at the disk's rate, and memory is two blocks.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from schemas.manifest import ArtifactFile

WRITEBACK_BYTES = 32 << 20


class HashingFile:
    """A new file that is appended to; blocks are C-contiguous uint8 arrays or bytes."""

    def __init__(self, path: Path) -> None:
        """Creates `path`, which must not exist."""
        self._file = path.open("xb", buffering=0)
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self.size_bytes = 0
        self._sent_bytes = 0

    def write(self, block: np.ndarray | bytes) -> None:
        """Appends `block`, which must stay as it is until the next `write` or `finish` has returned.

        Raises:
            OSError: of the file system, such as ENOSPC.
        """
        view = memoryview(block if isinstance(block, bytes) else block.data).cast("B")
        self._wait()
        self._pending = self._pool.submit(self._digest.update, view)
        self.size_bytes += len(view)
        while view:
            view = view[self._file.write(view) :]
        if self.size_bytes - self._sent_bytes >= WRITEBACK_BYTES:
            self._send()

    def finish(self) -> str:
        """Brings the file to the disk and gives its sha256."""
        self._wait()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def close(self) -> None:
        """Releases file and thread, whatever happened before."""
        self._pool.shutdown(wait=True)
        self._file.close()

    def _send(self) -> None:
        """Starts bringing what was written to the disk, so that `finish` does not find all of it waiting."""
        if hasattr(os, "posix_fadvise"):  # on Linux, DONTNEED begins the transfer of changed pages
            length = self.size_bytes - self._sent_bytes
            os.posix_fadvise(self._file.fileno(), self._sent_bytes, length, os.POSIX_FADV_DONTNEED)
        self._sent_bytes = self.size_bytes

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None


class Written:
    """The artifact's files so far."""

    def __init__(self, folder: Path) -> None:
        """`folder` exists; everything is written below it."""
        self.folder = folder
        self.files: list[ArtifactFile] = []

    @contextmanager
    def new(self, name: str) -> Iterator[HashingFile]:
        """A new file below the folder; it is listed once it is whole."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = HashingFile(path)
        try:
            yield file
            self.files.append(ArtifactFile(path=name, sha256=file.finish(), size_bytes=file.size_bytes))
        finally:
            file.close()

    def add(self, name: str, data: bytes) -> None:
        """A small file as a whole."""
        with self.new(name) as file:
            file.write(data)

    def size_bytes(self, name: str) -> int:
        """Size of a listed file."""
        return next(file.size_bytes for file in self.files if file.path == name)
