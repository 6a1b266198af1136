"""Compares our readers of flash with a program that only reads from the same disk: sizes x reads in flight.

Each read has one size and a random multiple of it as offset, in a file on this machine's disk, past the page cache.
`direct` (threads with `pread`) and `io_uring` are the plug-ins of runtime/flash as the store uses them: they check
every page against its checksum, and one submission has all reads of a round. `bare` is shared/bare_reads.c, compiled
here: as many threads, the same offsets, huge pages as in our read buffer, no checksums. In every round all take turns,
in an order of the round's own; a share is our bytes per second over bare's in the same round.
"""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option, spread
from benchmarks.shared.unbundled import file_as_artifact
from coldpress.runtime import _native, plugins
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import Flash

PAGE = 4096
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
DEPTHS = (1, 4, 16, 64)
OURS = ("direct", "io_uring")
ROUND_BYTES = 256 << 20
"""Size of the buffer, the most that one round reads."""
MIN_READS_PER_DEPTH = 4
"""Reads of a round for each one in flight: fewer would measure the beginning and the end."""


@dataclass(frozen=True)
class Disk:
    """The file that is read, and its readers."""

    path: Path
    page_crc32c: np.ndarray
    bare: Path
    """Path of the compiled bare_reads.c."""
    buffer: np.ndarray
    random: np.random.Generator

    def artifact(self) -> Artifact:
        """Returns the part of an open artifact that a reader of flash uses."""
        manifest = SimpleNamespace(flash=SimpleNamespace(page_bytes=PAGE, sections=()))
        return file_as_artifact(self.path, manifest, self.page_crc32c)

    def offsets(self, size: int, count: int) -> np.ndarray:
        """Returns random multiples of `size` within the file, int64 [count]."""
        return self.random.integers(0, self.path.stat().st_size // size, count) * size


def write_file(path: Path, num_bytes: int) -> np.ndarray:
    """Writes the file, one random block repeated, and returns the checksums of its pages."""
    block = np.random.default_rng(0).integers(0, 256, 64 << 20, np.uint8)
    repeats = -(-num_bytes // block.size)
    with path.open("wb") as file:
        for _ in range(repeats):
            file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
    return np.tile(_native.crc32c_pages(block, PAGE), repeats)


def ours(disk: Disk, name: str, offsets: np.ndarray, size: int, depth: int) -> float:
    """Returns the seconds that a reader of runtime/flash takes."""
    kind: Any = plugins.load_class("coldpress.runtime.flash", Flash, name)
    flash: Flash = kind(disk.artifact(), depth)
    assert flash.direct
    seconds = flash.submit(Extents(offsets, np.full(offsets.size, size)), disk.buffer).finish()
    flash.close()
    return seconds


def bare(disk: Disk, offsets: np.ndarray, size: int, depth: int) -> float:
    """Returns the seconds that bare_reads.c takes for the reads alone."""
    done = subprocess.run(
        [disk.bare, disk.path, str(size), str(depth), "1"],
        input=offsets.astype(np.uint64).tobytes(),
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(done.stdout)


def measure(disk: Disk, size: int, depth: int, rounds: int, reads_s: float) -> Row:
    least = MIN_READS_PER_DEPTH * depth
    first_s = bare(disk, disk.offsets(size, least), size, depth)
    count = max(least, min(int(least * reads_s / first_s), ROUND_BYTES // size))
    rates: dict[str, list[float]] = {name: [] for name in (*OURS, "bare")}
    for _ in range(rounds):
        for name in disk.random.permutation(list(rates)).tolist():
            offsets = disk.offsets(size, count)
            seconds = bare(disk, offsets, size, depth) if name == "bare" else ours(disk, name, offsets, size, depth)
            rates[name].append(count * size / seconds)
    figures = {f"{name}_bytes_per_s": spread(found) for name, found in rates.items()}
    shares = {f"{name}_share": spread(np.divide(rates[name], rates["bare"]).tolist()) for name in OURS}
    return {**figures, **shares, "best_share": max(share["median"] for share in shares.values())}


@dataclass(frozen=True)
class Options:
    sizes: tuple[int, ...] = option((4096, 65536, 1 << 20), smoke=(65536,), full=SIZES, help="bytes per read")
    depths: tuple[int, ...] = option((1, 16, 64), smoke=(4,), full=DEPTHS, help="reads in flight")
    rounds: int = option(5, smoke=2, help="rounds; each runs all readers in turn")
    reads_s: float = option(0.1, smoke=0.02, help="approximate seconds of one reader in one round")
    file_bytes: int = option(4 << 30, smoke=64 << 20, help="bytes of the file that is read")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].direct_bytes_per_s": "bytes per second of our reader `direct`",
        "rows[].io_uring_bytes_per_s": "bytes per second of our reader `io_uring`",
        "rows[].bare_bytes_per_s": "bytes per second of the bare program",
        "rows[].direct_share": "bytes per second of `direct` over the bare program's, taken in each round",
        "rows[].io_uring_share": "bytes per second of `io_uring` over the bare program's, taken in each round",
        "rows[].best_share": "larger of the medians of direct_share and io_uring_share",
        "worst_share": "least best_share of all rows",
        "worst_share_direct": "least median of direct_share of all rows",
        "worst_share_io_uring": "least median of io_uring_share of all rows",
    }
    is_timing = True
    programs = ("cc",)
    over = {"bytes": "sizes", "depth": "depths"}
    full_minutes = 3

    def measure(self, cell: Cell) -> Iterator[Row]:
        yield measure(
            self.once("disk", self._disk), cell["bytes"], cell["depth"], self.options.rounds, self.options.reads_s
        )

    def _disk(self) -> Disk:
        program, image = self.folder / "bare_reads", self.folder / "flash.img"
        source = Path(__file__).parent / "shared" / "bare_reads.c"
        subprocess.run(["cc", "-O2", "-pthread", "-o", program, source], check=True)
        buffer = _native.aligned_buffer(ROUND_BYTES)
        buffer[::PAGE] = 1  # touches each page, since a store's read buffer is in memory already
        sums = write_file(image, self.options.file_bytes)
        return Disk(image, sums, program, buffer, np.random.default_rng(1))

    def figures(self, rows: Rows) -> Figures:
        worst = {f"worst_share_{name}": min(row[f"{name}_share"]["median"] for row in rows) for name in OURS}
        return {"worst_share": min(row["best_share"] for row in rows), **worst}


if __name__ == "__main__":
    main("flash_io")
