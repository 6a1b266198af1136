"""Measures this machine: DRAM read bandwidth, and its storage as the runtime reads it, in several rounds.

Reads go through the runtime's own native reader (O_DIRECT, checksums, many reads in flight) to random places of a file
of random bytes. So the figures are what an artifact will get, not the best that the device could do.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.plan.memory import memory_groups
from coldpress.schemas.errors import ColdpressError

PAGE_BYTES = 4096
READ_SIZES = tuple(4096 << step for step in range(11))
"""4 KiB to 4 MiB."""
DEPTHS = (1, 2, 4, 8, 16, 32)
DEPTH_SUFFICES = 0.9
"""The queue depth is the smallest that reaches this share of the best rate of small reads."""
BLOCK_BYTES = 16 << 20
ROUND_BYTES = 128 << 20
"""A measurement reads at most this much, and at most `ROUND_READS` times."""
ROUND_READS = 4096
DRAM_BYTES = 256 << 20
DRAM_ROUNDS = 5
FLASH_ROUNDS = 3


@dataclass(frozen=True)
class Rounds:
    """The rates of equal rounds of one measurement."""

    rates: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Returns the difference of the best and the worst round as a share of the median."""
        return (max(self.rates) - min(self.rates)) / self.median

    @property
    def median(self) -> float:
        """Returns the median rate."""
        return statistics.median(self.rates)

    @property
    def best(self) -> float:
        """Returns the highest rate."""
        return max(self.rates)


@dataclass(frozen=True)
class FlashFigures:
    """Figures of storage: seconds of a single small read, reads in flight, and bytes per second of each round by read
    size."""

    latency_s: float
    queue_depth: int
    curve: tuple[tuple[int, Rounds], ...]


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def free_dram_bytes() -> int:
    """Returns the bytes of memory that this process may still take: the system's, or less by its control groups."""
    import psutil  # imported here: measuring a device must work without it

    return min([psutil.virtual_memory().available, *(group.left_bytes for group in memory_groups())])


def dram_rates() -> Rounds:
    """Measures bytes per second that all cores together read from memory far larger than the caches."""
    threads = num_cores()
    parts = np.array_split(np.ones(DRAM_BYTES // 8, dtype=np.float64), threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(DRAM_ROUNDS):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            rates.append(DRAM_BYTES / (time.perf_counter() - start))
    return Rounds(tuple(rates))


def measure_flash(folder: Path, file_bytes: int, tell: Callable[[str], None]) -> FlashFigures:
    """Measures reads of a new file of `file_bytes` random bytes in `folder`; removes the file afterwards.

    Args:
        folder: On the storage to measure.
        file_bytes: Size of the file.
        tell: Called with a line about each step before it begins.

    Raises:
        ColdpressError: if the file is too small to read from, or the file system refuses O_DIRECT.
    """
    if file_bytes < 2 * READ_SIZES[-1]:
        raise ColdpressError(
            f"a file of {file_bytes} bytes is too small to measure; at least {2 * READ_SIZES[-1]} are needed"
        )
    tell("writing the file that is read")
    with _random_file(folder, file_bytes) as (descriptor, checksums):
        reader = _Reader(descriptor, file_bytes, checksums)
        latency_s = statistics.median(reader.seconds(PAGE_BYTES, 1, seed) for seed in range(200))
        rates: dict[int, float] = {}
        for depth in DEPTHS:
            tell(f"reads of {PAGE_BYTES} bytes, {depth} at once")
            rates[depth] = reader.rates(PAGE_BYTES, depth).median
        depth = next(depth for depth in DEPTHS if rates[depth] >= DEPTH_SUFFICES * max(rates.values()))
        curve: list[tuple[int, Rounds]] = []
        for size in READ_SIZES:
            tell(f"reads of {size} bytes, {depth} at once")
            curve.append((size, reader.rates(size, depth)))
    return FlashFigures(latency_s, depth, tuple(curve))


@dataclass(frozen=True)
class _Reader:
    """Random reads of one open file."""

    descriptor: int
    file_bytes: int
    checksums: np.ndarray

    def seconds(self, size: int, count: int, seed: int = 0, depth: int = 1) -> float:
        """Returns the seconds for `count` reads of `size` bytes at random pages, `depth` at once."""
        rng = np.random.default_rng(seed)
        starts = rng.integers(0, (self.file_bytes - size) // PAGE_BYTES, count, endpoint=True).astype(np.uint64)
        offsets, lengths = starts * PAGE_BYTES, np.full(count, size, dtype=np.uint64)
        buffer = _native.aligned_buffer(size * count)
        places = np.arange(count, dtype=np.uint64) * size
        buffer[::PAGE_BYTES] = 1  # touch every page, so that page faults happen before the clock starts
        start = time.perf_counter()
        reads = _native.start_reads(
            self.descriptor, offsets, lengths, buffer, places, PAGE_BYTES, self.checksums, depth
        )
        bad = reads.finish()
        elapsed = time.perf_counter() - start
        if bad >= 0:
            raise ColdpressError(f"page {bad} of the measured file was not read back as written; the storage is faulty")
        return elapsed

    def rates(self, size: int, depth: int) -> Rounds:
        """Returns bytes per second of several rounds."""
        count = max(1, min(ROUND_READS, ROUND_BYTES // size))
        return Rounds(tuple(size * count / self.seconds(size, count, seed, depth) for seed in range(FLASH_ROUNDS)))


@contextmanager
def _random_file(folder: Path, file_bytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (descriptor for direct reads, checksum of each page) of a temporary file of random bytes."""
    path = folder / f".coldpress-measure.{os.getpid()}.tmp"
    try:
        checksums = _write(path, file_bytes)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            raise ColdpressError(
                f"the file system of {folder} refuses reads that bypass the page cache; name another with --folder"
            ) from error
        try:
            yield descriptor, checksums
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, file_bytes: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    sums = []
    with path.open("wb") as file:
        for start in range(0, file_bytes, BLOCK_BYTES):
            block = rng.integers(0, 256, min(BLOCK_BYTES, file_bytes - start), dtype=np.uint8)
            sums.append(_native.crc32c_pages(block, PAGE_BYTES))
            file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return np.concatenate(sums)
