"""The rate of `package` at 7B scale against the disk's, and its memory for several numbers of layers.

A planted checkpoint is quantized for real; orders are shuffled, so every unit moves. Each repetition is the command
that a build runs, `python -m coldpress.compiler package`, from its start to its end (imports, reading codes, flash
order, checksums, digests, fsync, the reader's check). Just before and after it, as many bytes go to the same disk as
plainly as can be: one block of the same size again and again, fsync at the end, once through the page cache and once
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.harness.apart import apart
from benchmarks.harness.benchmark import Benchmark, Cell, Row, option
from benchmarks.harness.command import main
from benchmarks.harness.timing import spread
from coldpress.compiler.io import load_record
from coldpress.schemas.families import FormatName
from coldpress.schemas.package import Package
from tests.support.planted import SHAPES
from tests.support.usage import Usage, measured

BLOCK_BYTES = 8 << 20
CODES = "records/quantized-*/*.safetensors"
HOT, COLD = "hot", "cold"


def prepare(folder: Path, checkpoint: Path, format_name: FormatName) -> None:
    """The records of a build in `folder`; its codes are on the disk."""
    from coldpress.compiler.io import Workspace, save_record
    from coldpress.compiler.stages import ingest
    from tests.support.records import Build

    model = ingest.run(ingest.IngestConfig(model=str(checkpoint)), Workspace(folder / "ingest", "benchmark"))
    build = Build(folder, method="predictor", format_name=format_name, layers_per_job=1, source=model)
    records = {"model": build.model, "corpus": build.corpus, "sparsity": build.sparsity, "device": build.device}
    records |= {
        "layout": build.layout,
        "plans": build.plans,
        "placement": build.placement,
        "predictors": build.predictors,
    }
    for name, record in records.items():
        save_record(record, folder / f"{name}.json")
    for name, parts in {"order": build.order, "quantized": build.quantized}.items():
        for number, part in enumerate(parts):
            save_record(part, folder / f"{name}-{number:03d}.json")


def package(folder: Path) -> tuple[Usage, Package]:
    """Packages once, by the command that a build runs; what it took, and the record that it wrote."""
    arguments: list[str | Path] = ["--artifact", folder / "model.coldpress", "--output", folder / "package.json"]
    for name in ("model", "corpus", "sparsity", "device", "layout", "plans", "placement", "predictors"):
        arguments += [f"--{name}", folder / f"{name}.json"]
    for name in ("order", "quantized"):
        arguments += [f"--{name}", *sorted(folder.glob(f"{name}-*.json"))]
    took = measured("-m", "coldpress.compiler", "package", *arguments, folder=folder)
    return took, load_record(folder / "package.json", Package)


def plain_bytes_per_s(folder: Path, num_bytes: int) -> tuple[float, float]:
    """The disk's sequential write rate (through the page cache, around it), fsync included."""
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
    """One core's rate: no file can be written and digested faster, since a digest is taken front to back."""
    block, hasher = os.urandom(BLOCK_BYTES), hashlib.sha256()
    start = time.perf_counter()
    for _ in range(32):
        hasher.update(block)
    return 32 * BLOCK_BYTES / (time.perf_counter() - start)


def drop(folder: Path) -> None:
    """Has the page cache forget the codes."""
    for path in folder.glob(CODES):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(folder: Path) -> None:
    """Has the page cache hold the codes."""
    for path in folder.glob(CODES):
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK_BYTES):
                pass


@dataclass(frozen=True)
class Options:
    """What is packaged."""

    shape: str = option("mistral-7b", smoke="small", choices=SHAPES, help="shape of the checkpoint")
    layers: tuple[int, ...] = option((1, 2), smoke=(1,), full=(2, 4), help="numbers of layers")
    formats: tuple[str, ...] = option(("int4_group32",), full=("int4_group32", "fp16"), help="formats")
    rounds: int = option(5, smoke=1, help="repetitions, each between two plain writes")


class Plugin(Benchmark[Options]):
    """Packages each checkpoint in each format, from hot and cold codes."""

    keys = {
        "rows[].layers": "layers",
        "rows[].format": "format",
        "rows[].codes": "hot: codes are in the page cache; cold: on the disk",
        "rows[].artifact_bytes": "bytes of the artifact",
        "rows[].package_bytes_per_s": "bytes per second of package",
        "rows[].cached_bytes_per_s": "bytes per second of plain writes through the page cache",
        "rows[].direct_bytes_per_s": "the same around it",
        "rows[].sha256_bytes_per_s": "bytes per second of SHA-256 on one core, the bound of a digested file",
        "rows[].write_ratio": "package's rate over the disk's, formed in each repetition",
        "rows[].cpu_share": "cores that package keeps busy",
        "rows[].peak_rss_bytes": "largest memory of a repetition",
        "write_ratio": "lowest median ratio of the hot cases with the most layers",
        "peak_rss_bytes": "largest memory of all",
        "rss_growth": "largest memory with the most layers over that with the fewest",
    }
    is_timing = True
    full_minutes = 25

    def cells(self) -> Iterator[Cell]:
        """A cell per number of layers, format and place of the codes."""
        for layers, form, codes in itertools.product(self.options.layers, self.options.formats, (HOT, COLD)):
            yield {"layers": layers, "format": form, "codes": codes}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """One row."""
        checkpoint, form = self.folder / f"model-{cell['layers']}", cell["format"]
        folder = self.once([cell["layers"], form], lambda: self.records(checkpoint, cell["layers"], form))
        yield row_of(folder, cell["codes"], self.options.rounds)

    def records(self, checkpoint: Path, layers: int, form: str) -> Path:
        """A folder with the records of a build; one checkpoint and one format are on the disk at a time."""
        for path in self.folder.iterdir():
            if path != checkpoint:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not checkpoint.exists():
            plant = ["--shape", self.options.shape, "--layers", str(layers), "--output", checkpoint]
            measured("-m", "tests.support.planted", *plant, folder=self.folder)
        made = self.folder / f"{layers}-{form}"
        made.mkdir()
        apart(self, "prepare", str(made), str(checkpoint), form)  # whose memory would slow package down
        return made

    def prepare(self, folder: str, checkpoint: str, form: str) -> None:
        """See `prepare`, in a process apart."""
        prepare(Path(folder), Path(checkpoint), cast("FormatName", form))

    def figures(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """The lowest ratio and the largest memory."""
        most = max(row["layers"] for row in rows)
        hot = [row for row in rows if row["codes"] == HOT]
        peak = {
            layers: max(row["peak_rss_bytes"] for row in hot if row["layers"] == layers) for layers in layers_of(hot)
        }
        return {
            "write_ratio": min(row["write_ratio"]["median"] for row in hot if row["layers"] == most),
            "peak_rss_bytes": max(row["peak_rss_bytes"] for row in rows),
            "rss_growth": peak[most] / peak[min(peak)],
        }


def layers_of(rows: Sequence[Row]) -> set[int]:
    """The numbers of layers that were measured."""
    return {row["layers"] for row in rows}


def row_of(folder: Path, codes: str, rounds: int) -> Row:
    """The row of one case, on records that `prepare` left in `folder`."""
    num_bytes = sum(path.stat().st_size for path in folder.glob(CODES))  # about what the artifact will have
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
