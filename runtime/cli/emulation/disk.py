"""Finds the disk that holds a file, measures how fast it reads at random, and states the caps of a command on it."""

import errno
import os
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coldpress.runtime import _native
from coldpress.schemas.errors import ColdpressError

SMALL_BYTES, LARGE_BYTES = 4096, 1 << 20
DEPTH = 32
WRITTEN_BYTES = 64 << 20
"""Size of the temporary file for the measurement, if there is no large file."""
LEAST_FILE_BYTES = 16 << 20
"""Least size of a file for the measurement: reads of a smaller one measure caches rather than the disk."""
SAMPLE_READS, SAMPLE_BYTES, ROUNDS = 6000, 256 << 20, 3


@dataclass(frozen=True)
class Caps:
    """Limits on the reads of one disk, and on memory, page cache included."""

    device: str
    scale: float
    """Share of the device's rates."""
    reads_per_s: int
    bytes_per_s: int
    memory_bytes: int


@dataclass(frozen=True)
class Rates:
    """Rates of random reads, many in flight."""

    reads_per_s: float
    """With reads of 4 KiB."""
    bytes_per_s: float
    """With reads of 1 MiB."""


@dataclass(frozen=True)
class Disk:
    name: str
    """The disk's node, such as /dev/sda."""
    number: str
    """major:minor."""
    place: Path
    """The file or folder for which the disk was found."""

    def measured(self) -> Rates:
        """Measures the disk's rates on the largest file at `place`: the median of several rounds.

        In a folder without a large file it writes a temporary one. Raises `ColdpressError` if the file is too small or
        cannot be written, or the file system has no direct reads.
        """
        path = max(_files(self.place), key=lambda file: file.stat().st_size, default=None)
        if path is not None and path.stat().st_size >= LEAST_FILE_BYTES:
            return _rates(path)
        if self.place.is_file():
            raise ColdpressError(
                f"{self.place}: the disk's speed is measured on a file of at least {LEAST_FILE_BYTES} bytes, this one "
                f"has {self.place.stat().st_size}; name a larger one or a folder with --place, or give the --scale"
            )
        with _temporary_file(self.place) as written:
            return _rates(written)

    def measured_if_possible(self) -> Rates | None:
        try:
            return self.measured()
        except ColdpressError:
            return None


def _rates(path: Path) -> Rates:
    size, random = path.stat().st_size, np.random.default_rng(0)
    buffer = _native.aligned_buffer(SAMPLE_BYTES)
    buffer[::SMALL_BYTES] = 1  # touches every page, so that page faults are not part of the measured time
    file = _opened(path)
    try:
        small = [_seconds(file, size, SMALL_BYTES, SAMPLE_READS, buffer, random) for _ in range(ROUNDS)]
        many = SAMPLE_BYTES // LARGE_BYTES
        large = [_seconds(file, size, LARGE_BYTES, many, buffer, random) for _ in range(ROUNDS)]
    finally:
        os.close(file)
    return Rates(SAMPLE_READS / float(np.median(small)), SAMPLE_BYTES / float(np.median(large)))


@contextmanager
def _temporary_file(folder: Path) -> Generator[Path]:
    random = np.random.default_rng(0)
    try:
        with tempfile.TemporaryFile(prefix=".coldpress-", dir=folder) as file:
            for _ in range(WRITTEN_BYTES // LARGE_BYTES):
                file.write(random.bytes(LARGE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            yield Path(f"/proc/self/fd/{file.fileno()}")
    except OSError as error:
        raise ColdpressError(
            f"{folder}: the disk's speed is measured on a file of at least {LEAST_FILE_BYTES} bytes, there is none, "
            f"and none can be written ({error.strerror}); name one with --place, or give the --scale"
        ) from error


def disk_of(place: Path, blocks: Path = Path("/sys/dev/block")) -> Disk:
    """Finds the disk that holds a file or folder. Raises `ColdpressError` if no disk holds it: it is in memory, on a
    network or in a layered file system."""
    found = place.stat().st_dev
    entry = blocks / f"{os.major(found)}:{os.minor(found)}"
    if not entry.exists():
        raise ColdpressError(
            f"{place}: it is not on a disk that the kernel can cap (device {entry.name}, as tmpfs, overlay and network "
            "file systems have); move it to a disk"
        )
    whole = entry.resolve()
    if (whole / "partition").exists():  # caps are for whole disks
        whole = whole.parent
    return Disk(f"/dev/{whole.name}", (whole / "dev").read_text().strip(), place)


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else [path for path in place.iterdir() if path.is_file()]


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ColdpressError(
            f"{path}: the file system has no direct reads, with which the disk's speed is measured; give the --scale"
        ) from error


def _seconds(
    file: int, size: int, read_bytes: int, count: int, buffer: np.ndarray, random: np.random.Generator
) -> float:
    offsets = random.integers(0, size // read_bytes, count).astype(np.uint64) * read_bytes
    lengths, into = (np.full(count, read_bytes, np.uint64), np.arange(count, dtype=np.uint64) * read_bytes)
    nothing = np.zeros(size // SMALL_BYTES, np.uint32)  # wrong checksums: only the time counts, not the result
    start = time.perf_counter()
    _native.start_reads(file, offsets, lengths, buffer, into, SMALL_BYTES, nothing, DEPTH).finish()
    return time.perf_counter() - start
