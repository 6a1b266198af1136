"""Measures this machine in several rounds: DRAM read bandwidth, its storage as the runtime reads it, and its products.

Reads go through the runtime's own native reader (O_DIRECT, checksums, many reads in flight) to random places of a file
of random bytes. So the figures are what an artifact will get, not the best that the device could do. Products are the
runtime's own, by format and density, with all of its threads. Weights are far larger than the processor's caches, rows
are those of a 7B's MLP, and each call uses other rows, so that memory is measured with the arithmetic.
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.kernels import mlp
from coldpress.runtime.kernels.activations import DEFAULT_ACTIVATIONS
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.runtime.store.memory import copy_rows
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FormatName

PAGE_BYTES = 4096
READ_SIZES = tuple(4096 << step for step in range(9))
"""4 KiB to 1 MiB, twice the longest read of the runtime."""
DEPTHS = (1, 2, 4, 8, 16, 32)
DEPTH_SUFFICES = 0.9
"""The queue depth is the smallest that reaches this share of the best rate of small reads."""
BLOCK_BYTES = 16 << 20
ROUND_BYTES = 32 << 20
"""A measurement reads at most this much, and at most `ROUND_READS` times."""
ROUND_READS = 1024
DRAM_BYTES = 256 << 20
DRAM_ROUNDS = 5
FLASH_ROUNDS = 5
ROW_LENGTH = 4096
WEIGHT_BYTES = 96 << 20
DENSITIES = (0.1, 0.5, 1.0)
KERNEL_ROUNDS = 9
ENCODED_UNITS = 64
ROLES = 3
"""Gate, up and down: the slices of a unit."""
PASS_FORMAT, PASS_TOKENS = "int4_group32", 5
"""The format and the tokens of the pass in which tokens share the passing of weights."""


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
        return statistics.median(self.rates)

    @property
    def best(self) -> float:
        return max(self.rates)


@dataclass(frozen=True)
class GridPoint:
    """Bytes per second of reads of one size, so many in flight."""

    read_bytes: int
    in_flight: int
    rounds: Rounds


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


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


def measure_flash(folder: Path, file_bytes: int, tell: Callable[[str], None]) -> tuple[GridPoint, ...]:
    """Measures reads of a new file of `file_bytes` random bytes in `folder`, a point for each of `READ_SIZES` and
    `DEPTHS`; removes the file afterwards. Each round measures the whole grid, so that a disturbance hits one round of
    many points, and not all of one. Raises ColdpressError if the file is too small to read from, or the file system
    refuses O_DIRECT."""
    if file_bytes < 2 * READ_SIZES[-1]:
        raise ColdpressError(
            f"a file of {file_bytes} bytes is too small to measure; at least {2 * READ_SIZES[-1]} are needed"
        )
    tell("writing the file that is read")
    places = list(itertools.product(READ_SIZES, DEPTHS))
    rates: dict[tuple[int, int], list[float]] = {place: [] for place in places}
    with sample(folder, file_bytes) as reader:
        for number in range(FLASH_ROUNDS):
            tell(
                f"round {number + 1} of {FLASH_ROUNDS}: reads of {READ_SIZES[0]} to {READ_SIZES[-1]} bytes, "
                f"{DEPTHS[0]} to {DEPTHS[-1]} at once"
            )
            for size, depth in places:
                rates[size, depth].append(reader.rate(size, depth, number))
    return tuple(GridPoint(size, depth, Rounds(tuple(found))) for (size, depth), found in rates.items())


def depth_of(points: Sequence[GridPoint]) -> int:
    """Returns the least number of reads in flight with nearly the best rate of the smallest reads."""
    smallest = min(point.read_bytes for point in points)
    rates = {point.in_flight: point.rounds.median for point in points if point.read_bytes == smallest}
    return min(depth for depth, rate in rates.items() if rate >= DEPTH_SUFFICES * max(rates.values()))


@contextmanager
def sample(folder: Path, file_bytes: int) -> Iterator["Reader"]:
    """Yields a reader of a temporary file of random bytes; raises as `measure_flash`."""
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
            buffer = _native.aligned_buffer(max(ROUND_BYTES, READ_SIZES[-1]))
            buffer[::PAGE_BYTES] = 1  # touches each page, so that no page fault is measured
            yield Reader(descriptor, file_bytes, checksums, buffer)
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Reader:
    descriptor: int
    file_bytes: int
    checksums: np.ndarray
    buffer: np.ndarray

    def rate(self, size: int, depth: int, seed: int) -> float:
        """Returns the bytes per second of reads of `size` bytes at random pages, `depth` at once."""
        count = max(1, min(ROUND_READS, ROUND_BYTES // size))
        rng = np.random.default_rng([seed, size, depth])
        starts = rng.integers(0, (self.file_bytes - size) // PAGE_BYTES, count, endpoint=True).astype(np.uint64)
        return size * count / self.seconds(starts * PAGE_BYTES, np.full(count, size, dtype=np.uint64), depth)

    def seconds(self, offsets: np.ndarray, lengths: np.ndarray, depth: int) -> float:
        """Returns the seconds of reads of whole pages that are requested together, uint64 bytes, `depth` at once."""
        places = np.cumsum(lengths, dtype=np.uint64) - lengths
        start = time.perf_counter()
        reads = _native.start_reads(
            self.descriptor, offsets, lengths, self.buffer, places, PAGE_BYTES, self.checksums, depth
        )
        bad = reads.finish()
        elapsed = time.perf_counter() - start
        if bad >= 0:
            raise ColdpressError(f"page {bad} of the measured file was not read back as written; the storage is faulty")
        return elapsed


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


def kernel_rates() -> Iterator[tuple[FormatName, float, Rounds]]:
    """Yields (format, density, bytes per second of the rows that are used), in that order of formats and densities."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(ROW_LENGTH).astype(np.float32)
    for name in names("coldpress.runtime.quantization"):
        units, layout = _units(name, rng)
        rest = layout, x[None], mlp.Terms()
        for density in DENSITIES:
            count = max(1, round(density * len(units)))
            drawn = [np.sort(rng.permutation(len(units))[:count]).astype(np.int32) for _ in range(KERNEL_ROUNDS + 1)]
            calls = [partial(mlp.mlp, units, slots, *rest, activations=DEFAULT_ACTIVATIONS) for slots in drawn]
            yield name, density, timed(count * units.shape[1], calls)


def further_shares() -> list[float]:
    """Measures what each further token of a pass takes of the first one's products, at most all of it; in order."""
    rng = np.random.default_rng(0)
    units, layout = _units(PASS_FORMAT, rng)
    slots = np.arange(len(units), dtype=np.int32)
    x = rng.standard_normal((PASS_TOKENS, ROW_LENGTH)).astype(np.float32)
    one, several = (
        partial(mlp.mlp, units, slots, layout, x[:count], mlp.Terms(), activations=DEFAULT_ACTIVATIONS)
        for count in (1, PASS_TOKENS)
    )
    rates = timed(1, [several, *[one, several] * KERNEL_ROUNDS]).rates
    shares = [
        (alone / together - 1) / (PASS_TOKENS - 1) for alone, together in zip(rates[::2], rates[1::2], strict=True)
    ]
    return sorted(min(1.0, max(0.0, share)) for share in shares)


def _units(name: FormatName, rng: np.random.Generator) -> tuple[np.ndarray, mlp.UnitLayout]:
    """Returns units of random weights, uint8 [num_units, unit_bytes], and where their slices lie."""
    plugin = load("coldpress.runtime.quantization", Format, name)
    size = plugin.nbytes(ROW_LENGTH)
    block = plugin.encode(rng.standard_normal((ROLES * ENCODED_UNITS, ROW_LENGTH)).astype(np.float32) / 64)
    num_units = max(1, WEIGHT_BYTES // (ROLES * size))
    units = np.resize(block.reshape(ENCODED_UNITS, ROLES * size), (num_units, ROLES * size))
    return units, mlp.UnitLayout((0, name), (size, name), (2 * size, name), ROW_LENGTH, "silu", 0.0)


def copy_rate() -> Rounds:
    unit_bytes = ROLES * ROW_LENGTH
    count = max(1, WEIGHT_BYTES // 4 // unit_bytes)
    rows, slots = np.ones((count, unit_bytes), np.uint8), np.zeros((count, unit_bytes), np.uint8)
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    copy = partial(copy_rows, rows, np.arange(count, dtype=np.int32), slots, order)
    return timed(count * unit_bytes, [copy] * (KERNEL_ROUNDS + 1))


def timed(num_bytes: int, calls: Sequence[Callable[[], object]]) -> Rounds:
    """Returns bytes per second of each call but the first, which does not count."""
    rates = []
    for call in calls:
        start = time.perf_counter()
        call()
        rates.append(num_bytes / (time.perf_counter() - start))
    return Rounds(tuple(rates[1:]))
