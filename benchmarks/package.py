"""Measures the rate of `package` at 7B scale against the disk's, and its memory for several numbers of layers.

A planted checkpoint is quantized for real; orders are shuffled, so every unit moves. Each repetition is the command
that a build runs, `python -m coldpress.compiler package`, from its start to its end (imports, reading codes, flash
order, checksums, digests, fsync, the reader's check). Just before and after it, as many bytes go to the same disk as
plainly as possible: one block of the same size again and again, fsync at the end, once through the page cache and once
around it (O_DIRECT). The disk's rate is the better of the two ways, the mean of before and after.

Codes are read from the page cache, where `quantize` left them (`hot`); `cold` cases drop them before each repetition,
so that the disk reads as many bytes as it writes.
"""

import hashlib
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option, spread
from benchmarks.harness.apart import apart
from coldpress.compiler.io import load_record
from coldpress.schemas.families import FormatName
from coldpress.schemas.package import Package
from tests.support.planted import SHAPES
from tests.support.usage import Usage, measured

BLOCK_BYTES = 8 << 20
CODES = "records/quantized-*/*.safetensors"
HOT, COLD = "hot", "cold"
RECORDS = ("model", "corpus", "sparsity", "device", "layout", "plans", "placement", "predictors")
CHUNKED = ("order", "quantized")
"""Arguments of `package` that take a record per chunk."""


def package(folder: Path) -> tuple[Usage, Package]:
    """Packages once, by the command of a build; returns its usage and the record that it wrote."""
    arguments: list[str | Path] = ["--artifact", folder / "model.coldpress", "--output", folder / "package.json"]
    for name in RECORDS:
        arguments += [f"--{name}", folder / f"{name}.json"]
    for name in CHUNKED:
        arguments += [f"--{name}", *sorted(folder.glob(f"{name}-*.json"))]
    took = measured("-m", "coldpress.compiler", "package", *arguments, folder=folder)
    return took, load_record(folder / "package.json", Package)


def plain_bytes_per_s(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Returns the disk's sequential write rate (through the page cache, around it), fsync included."""
    return _plain(folder, num_bytes, 0), _plain(folder, num_bytes, os.O_DIRECT)


def _plain(folder: Path, num_bytes: int, flag: int) -> float:
    from coldpress.runtime import _native

    block = _native.aligned_buffer(BLOCK_BYTES)
    block[:] = memoryview(os.urandom(BLOCK_BYTES))
    path, count = folder / "plain", -(-num_bytes // BLOCK_BYTES)
    start = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag)
    for _ in range(count):
        os.write(descriptor, block.data)
    os.fsync(descriptor)
    elapsed_s = time.perf_counter() - start
    os.close(descriptor)
    path.unlink()
    return count * BLOCK_BYTES / elapsed_s


def sha256_bytes_per_s() -> float:
    """Returns one core's rate; it limits writing with a digest, since a digest is taken front to back."""
    block, hasher = os.urandom(BLOCK_BYTES), hashlib.sha256()
    start = time.perf_counter()
    for _ in range(32):
        hasher.update(block)
    return 32 * BLOCK_BYTES / (time.perf_counter() - start)


def drop(folder: Path) -> None:
    """Drops the codes from the page cache."""
    for path in folder.glob(CODES):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(folder: Path) -> None:
    """Reads the codes into the page cache."""
    for path in folder.glob(CODES):
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK_BYTES):
                pass


@dataclass(frozen=True)
class Options:
    shape: str = option("mistral-7b", smoke="small", choices=SHAPES, help="model whose layers' shape is used")
    layers: tuple[int, ...] = option((1, 2), smoke=(1,), full=(2, 4), help="numbers of layers, one checkpoint each")
    formats: tuple[str, ...] = option(("int4_group32",), full=("int4_group32", "fp16"), help="formats of the weights")
    rounds: int = option(5, smoke=1, help="repetitions, each between two plain writes")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].codes": "hot: the codes are in the page cache; cold: on the disk alone",
        "rows[].artifact_bytes": "bytes of the artifact",
        "rows[].package_bytes_per_s": "bytes of the artifact over the seconds of the whole command package",
        "rows[].cached_bytes_per_s": "bytes per second of plain writes through the page cache, fsync included",
        "rows[].direct_bytes_per_s": "bytes per second of plain writes past the page cache (O_DIRECT), fsync included",
        "rows[].sha256_bytes_per_s": "bytes per second of SHA-256 on one core, the bound of a file with a digest",
        "rows[].write_ratio": "package's rate over that of the faster plain writes, taken in each repetition",
        "rows[].cpu_share": "processor seconds of package over its wall seconds: cores that are busy on average",
        "rows[].peak_rss_bytes": "peak resident bytes of package, largest of the repetitions",
        "write_ratio": "least median of write_ratio, of the hot cases with the most layers",
        "peak_rss_bytes": "largest peak_rss_bytes of all rows",
        "rss_growth": "peak_rss_bytes with the most layers over that with the fewest, of hot cases",
    }
    is_timing = True
    over = {"layers": "layers", "format": "formats", "codes": (HOT, COLD)}
    full_minutes = 25

    def measure(self, cell: Cell) -> Iterator[Row]:
        checkpoint, form = self.folder / f"model-{cell['layers']}", cell["format"]
        folder = self.once([cell["layers"], form], lambda: self.records(checkpoint, cell["layers"], form))
        yield row_of(folder, cell["codes"], self.options.rounds)

    def records(self, checkpoint: Path, layers: int, form: str) -> Path:
        """Returns a folder with a build's records; the disk holds only one checkpoint and one format at a time."""
        for path in self.folder.iterdir():
            if path != checkpoint:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not checkpoint.exists():
            plant = ["--shape", self.options.shape, "--layers", str(layers), "--output", checkpoint]
            measured("-m", "tests.support.planted", *plant, folder=self.folder)
        made = self.folder / f"{layers}-{form}"
        made.mkdir()
        apart(self, "prepare", str(made), str(checkpoint), form)  # a process apart, since its memory would slow package
        return made

    def prepare(self, made: str, checkpoint: str, form: FormatName) -> None:
        """Writes the records of a build to a folder, with its codes; runs in a process apart."""
        from coldpress.compiler.io import Workspace, save_record
        from coldpress.compiler.stages import ingest
        from tests.support.records import Build

        folder = Path(made)
        model = ingest.run(ingest.IngestConfig(model=checkpoint), Workspace(folder / "ingest", "benchmark"))
        build = Build(folder, method="predictor", format_name=form, layers_per_job=1, source=model)
        for name in RECORDS:
            save_record(getattr(build, name), folder / f"{name}.json")
        for name in CHUNKED:
            for number, part in enumerate(getattr(build, name)):
                save_record(part, folder / f"{name}-{number:03d}.json")

    def figures(self, rows: Rows) -> Figures:
        most = max(row["layers"] for row in rows)
        hot = [row for row in rows if row["codes"] == HOT]
        peak = {
            layers: max(row["peak_rss_bytes"] for row in hot if row["layers"] == layers)
            for layers in self.options.layers
        }
        return {
            "write_ratio": min(row["write_ratio"]["median"] for row in hot if row["layers"] == most),
            "peak_rss_bytes": max(row["peak_rss_bytes"] for row in rows),
            "rss_growth": peak[most] / peak[min(peak)],
        }


def row_of(folder: Path, codes: str, rounds: int) -> Row:
    """Returns the row of one case, from the records that `prepare` left in `folder`."""
    num_bytes = sum(path.stat().st_size for path in folder.glob(CODES))  # about the size of the artifact
    found: list[tuple[Usage, Package]] = []
    ways, hashing = list[tuple[float, float]](), list[float]()
    for _ in range(rounds):
        warm(folder) if codes == HOT else drop(folder)
        ways = ways or [plain_bytes_per_s(folder, num_bytes)]
        found.append(package(folder))
        shutil.rmtree(folder / "model.coldpress")
        ways.append(plain_bytes_per_s(folder, num_bytes))
        hashing.append(sha256_bytes_per_s())
    if len({done.manifest_sha256 for _, done in found}) != 1:
        raise RuntimeError(f"{rounds} runs gave different artifacts")
    rates = [done.artifact_bytes / took.wall_s for took, done in found]
    plain = [max(map(statistics.mean, zip(*pair, strict=True))) for pair in itertools.pairwise(ways)]
    return {
        "artifact_bytes": found[0][1].artifact_bytes,
        "package_bytes_per_s": spread(rates),
        "cached_bytes_per_s": spread([way[0] for way in ways]),
        "direct_bytes_per_s": spread([way[1] for way in ways]),
        "sha256_bytes_per_s": spread(hashing),
        "write_ratio": spread([rate / disk for rate, disk in zip(rates, plain, strict=True)]),
        "cpu_share": spread([took.cpu_s / took.wall_s for took, _ in found]),
        "peak_rss_bytes": max(took.peak_rss_bytes for took, _ in found),
    }


if __name__ == "__main__":
    main("package")
