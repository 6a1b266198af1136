"""Reads of flash.img that bypass the page cache, many in flight, with every page checked against its checksum.

The page cache would keep copies of the weights in DRAM outside the budget, so the file is opened with O_DIRECT. If the
file system refuses O_DIRECT, `direct` is False, a warning is logged, and the kernel is told at once to drop the pages
that were read. The native core issues reads on up to `queue_depth` threads (LLM in a flash 4: parallel reads; Ripple
2.2: queue depth).
"""

import errno
import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.artifact.errors import DAMAGED, DeviceError
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import Flash, Landing
from coldpress.schemas.errors import CorruptPageError
from coldpress.schemas.manifest import FLASH_FILE


class Plugin(Flash):
    MAX_IN_FLIGHT: ClassVar[int] = 32
    """More waiting threads cost more than they gain, at any queue depth of the device."""
    start_reads = staticmethod(_native.start_reads)

    def __init__(self, artifact: Artifact, queue_depth: int) -> None:
        """Opens the file. Raises `ArtifactError` if the file is missing, a link, or of another size."""
        self._artifact = artifact
        self._page_bytes, self._page_crc32c = artifact.manifest.flash.page_bytes, artifact.page_crc32c
        self._num_in_flight = min(queue_depth, self.MAX_IN_FLIGHT)
        self._file, self.direct = _open(artifact, self._page_bytes)
        self._finalizer = weakref.finalize(self, os.close, self._file)
        if not self.direct:
            logging.getLogger("coldpress").warning(
                "%s: the file system refuses O_DIRECT; reads go through the page cache, outside the DRAM budget",
                FLASH_FILE,
            )

    def submit(self, extents: Extents, into: np.ndarray, landing: Landing | None = None) -> "DirectReads":
        places = extents.offsets, extents.lengths, extents.buffer_offsets
        offsets, lengths, buffer_offsets = (numbers.astype(np.uint64) for numbers in places)
        checks = self._page_bytes, self._page_crc32c, self._num_in_flight
        start = partial(self.start_reads, self._file, offsets, lengths, into, buffer_offsets, *checks, landing)
        return DirectReads(self, extents, start, start())

    def close(self) -> None:
        self._finalizer()

    def result(self, extents: Extents, reads: _native.Reads) -> Exception | None:
        """Waits for reads that `submit` began; returns the failure, if there is one."""
        try:
            bad_page = reads.finish()
        except OSError as error:
            return DeviceError(FLASH_FILE, "a read", f"failing ({error.strerror})", "data", "check the storage device")
        if not self.direct and extents.offsets.size:
            first, last = int(extents.offsets[0]), int(extents.offsets[-1] + extents.lengths[-1])
            os.posix_fadvise(self._file, first, last - first, os.POSIX_FADV_DONTNEED)
        return self._corrupt(bad_page) if bad_page >= 0 else None

    def _corrupt(self, page: int) -> CorruptPageError:
        start, expected = page * self._page_bytes, int(self._artifact.page_crc32c[page])
        return CorruptPageError(
            f"{FLASH_FILE}: page {page} at byte {start} ({_place(self._artifact, start, self._page_bytes)}) does not "
            f"have the checksum {expected:08x} that the tables give, also when read again; {DAMAGED}"
        )


@dataclass
class DirectReads:
    _flash: Plugin
    _extents: Extents
    _start: Callable[[], _native.Reads]
    """Begins the reads in the native core, at first or once more."""
    _reads: _native.Reads
    _waited_s: float = 0.0
    _finished: bool = False

    def wait(self, count: int) -> None:
        start = time.perf_counter()
        whole = self._finished or self._reads.wait(count)
        self._waited_s += time.perf_counter() - start
        if not whole:
            self.finish()

    def finish(self) -> float:
        """Raises `CorruptPageError`, which names page and sections, or `DeviceError` if the device fails twice."""
        if not self._finished:
            start = time.perf_counter()
            failure = self._flash.result(self._extents, self._reads)
            if failure:
                self._reads = self._start()
                failure = self._flash.result(self._extents, self._reads)
            if failure:
                raise failure
            self._finished = True
            self._waited_s += time.perf_counter() - start
        return self._waited_s

    def abandon(self) -> float:
        start = time.perf_counter()
        self._flash.result(self._extents, self._reads)
        return self._waited_s + time.perf_counter() - start


def _place(artifact: Artifact, start: int, length: int) -> str:
    flash = artifact.manifest.flash
    touched = [
        section.name
        for section in (*flash.sections, *flash.tables)
        if section.offset_bytes < start + length and start < section.offset_bytes + section.length_bytes
    ]
    return " and ".join(touched) or "padding"


def _open(artifact: Artifact, page_bytes: int) -> tuple[int, bool]:
    try:
        return _open_direct(artifact, page_bytes), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return artifact.open(FLASH_FILE), False


def _open_direct(artifact: Artifact, page_bytes: int) -> int:
    """Opens with O_DIRECT and reads a page at an offset: some file systems refuse only then, or need larger pages."""
    opened = artifact.open(FLASH_FILE, os.O_DIRECT)
    try:
        os.preadv(opened, [_native.aligned_buffer(page_bytes).data], page_bytes)
    except BaseException:
        os.close(opened)
        raise
    return opened
