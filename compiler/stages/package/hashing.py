"""Writes files of an artifact front to back, once, and computes their size and digest on the way.

A file passes through three blocks: while one is filled, two threads hash and write the one before it (copying, SHA-256
and writing release the interpreter lock). Writes bypass the page cache where the file system allows it, so that no
dirty pages pile up and the processor copies nothing for the disk; elsewhere each block's transfer starts at once. A
digest is computed front to back, so one core's SHA-256 bounds one file; files are therefore written side by side.
"""

import errno
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from coldpress.compiler.io import naming
from coldpress.runtime import _native
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.manifest import ArtifactFile

BLOCK_BYTES = 8 << 20
"""Bytes per write, a multiple of every page size."""
NUM_BLOCKS = 3
DIRECT_ALIGN_BYTES = 4096
"""Alignment of writes that bypass the page cache: their address, offset and length are multiples of this."""

OnBlock = Callable[[np.ndarray], None]


class HashingFile:
    def __init__(self, path: Path, on_block: OnBlock | None = None) -> None:
        """Creates `path`, which must not exist; `on_block` sees every block, uint8 [n], in order, in a thread."""
        self._path = path
        self._descriptor, self._direct = _create(path)
        self._on_block = on_block
        self._digest = hashlib.sha256()
        self._hasher, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._blocks = deque(_native.aligned_buffer(BLOCK_BYTES) for _ in range(NUM_BLOCKS))
        self._pending: deque[tuple[Future[None], Future[None]]] = deque()
        self._put_bytes = 0
        self._filled = 0

    @property
    def size_bytes(self) -> int:
        return self._put_bytes + self._filled

    def room(self) -> np.ndarray:
        """Returns the unfilled part of the current block, uint8 [n], never empty."""
        return self._blocks[0][self._filled :]

    def advance(self, num_bytes: int) -> None:
        """Records that `num_bytes` of `room` have been filled. Raises the file system's OSError, such as ENOSPC; an
        earlier block may have caused it."""
        self._filled += num_bytes
        if self._filled == BLOCK_BYTES:
            self._put()

    def write(self, data: np.ndarray | bytes, copied: Callable[[int], None] | None = None) -> None:
        """Appends C-contiguous `data`; calls `copied` with the bytes of each part of at most a block. Raises as
        `advance`."""
        rest = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
        while rest.size:
            part = rest[: self.room().size]
            self.room()[: part.size] = part
            if copied:
                copied(part.size)
            self.advance(part.size)
            rest = rest[part.size :]

    def finish(self) -> str:
        """Syncs the file to disk and returns its sha256."""
        self._put()
        while self._pending:
            self._wait()
        os.truncate(self._descriptor, self.size_bytes)  # direct writes padded the last block to the alignment
        os.fsync(self._descriptor)
        return self._digest.hexdigest()

    def close(self) -> None:
        self._hasher.shutdown(wait=True)
        self._writer.shutdown(wait=True)
        os.close(self._descriptor)

    def _put(self) -> None:
        block, filled = self._blocks[0], self._filled
        if not filled:
            return
        aligned = -(-filled // DIRECT_ALIGN_BYTES) * DIRECT_ALIGN_BYTES
        block[filled:aligned] = 0
        try:
            digested = self._hasher.submit(self._digest.update, block[:filled].data)
            written = self._writer.submit(self._write_block, block, filled, aligned, self._put_bytes)
        except RuntimeError as error:  # the first block of a file starts its threads
            raise ColdpressError(
                f"{self._path.name} cannot be written: the system gives no more threads or memory ({error}); free "
                "some, then build again"
            ) from error
        self._pending.append((digested, written))
        self._put_bytes, self._filled = self._put_bytes + filled, 0
        self._blocks.rotate(-1)
        if len(self._pending) == NUM_BLOCKS:
            self._wait()

    def _wait(self) -> None:
        for future in self._pending.popleft():
            future.result()

    def _write_block(self, block: np.ndarray, filled: int, aligned: int, place: int) -> None:
        if self._on_block:
            self._on_block(block[:filled])
        data, start = block[:aligned].data, place
        while data:
            count = os.pwrite(self._descriptor, data, place)
            data, place = data[count:], place + count
        if not self._direct and hasattr(os, "posix_fadvise"):  # on Linux, DONTNEED starts writing dirty pages back
            os.posix_fadvise(self._descriptor, start, aligned, os.POSIX_FADV_DONTNEED)


def _create(path: Path) -> tuple[int, bool]:
    """Returns (descriptor of the new file, whether its writes bypass the page cache)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return os.open(path, flags | direct, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # file systems without direct writes answer EINVAL
                raise
            path.unlink(missing_ok=True)
    return os.open(path, flags, 0o666), False


class Written:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[ArtifactFile] = []

    @contextmanager
    def new(self, name: str, on_block: OnBlock | None = None) -> Iterator[HashingFile]:
        """Opens a new file below the folder; lists it once it is whole. Several may be open at once."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = HashingFile(path, on_block)
        try:
            with naming(path):
                yield file
                self.files.append(ArtifactFile(path=name, sha256=file.finish(), size_bytes=file.size_bytes))
        finally:
            file.close()

    def add(self, name: str, data: bytes) -> None:
        with self.new(name) as file:
            file.write(data)

    def copy(self, source: Path, name: str) -> None:
        with source.open("rb") as opened, self.new(name) as file:
            shutil.copyfileobj(opened, file, BLOCK_BYTES)

    def size_bytes(self, name: str) -> int:
        return next(file.size_bytes for file in self.files if file.path == name)
