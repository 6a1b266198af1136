"""`package` at 7B scale: its rate against the disk's own, and its memory for two numbers of layers.

`python -m benchmarks.package [--shape mistral-7b] [--layers 2 4] [--formats int4_group32 fp16] [--pairs 5]`. A
planted checkpoint is quantized for real; orders are shuffled, so every unit moves. Each repetition is the command that
a build runs, `python -m coldpress.compiler package`, from its start to its end (imports, reading codes, flash order,
checksums, digests, fsync, the reader's check). Just before and after it, as many bytes go to the same disk as plainly
as can be: one block of the same size again and again, fsync at the end, once through the page cache and once around it
(O_DIRECT). The disk's rate is the better of the two ways, the mean of before and after. write_ratio of a case is the
median over the repetitions.

Codes are read from the page cache, where `quantize` left them (`hot`); `cold` cases drop them before each repetition,
so that the disk reads as many bytes as it writes. The last line is {write_ratio, peak_rss_bytes, …}: the lowest ratio
of the hot cases with the most layers, and the largest memory of all; rss_growth is that of the most layers over the
fewest.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.shared.report import finish, show
from coldpress.compiler.io import load_record
from coldpress.schemas.families import FormatName
from coldpress.schemas.package import Package
from tests.support.usage import Usage, measured

MODULE = "benchmarks.package"
BLOCK_BYTES = 8 << 20
CODES = "records/quantized-*/*.safetensors"


def prepare(folder: Path, checkpoint: Path, format_name: FormatName) -> None:
    """The records of a build in `folder`; its codes are on the disk."""
    from coldpress.compiler.io import Workspace, save_record
    from coldpress.compiler.stages import ingest
    from tests.support.records import Build

    model = ingest.run(ingest.IngestConfig(model=str(checkpoint)), Workspace(folder / "ingest", "benchmark"))
    build = Build(folder, method="predictor", format_name=format_name, layers_per_job=1, source=model)
    records = {"model": build.model, "corpus": build.corpus, "sparsity": build.sparsity, "device": build.device}
    records |= {"layout": build.layout, "placement": build.placement, "predictors": build.predictors}
    for name, record in records.items():
        save_record(record, folder / f"{name}.json")
    for name, parts in {"order": build.order, "quantized": build.quantized}.items():
        for number, part in enumerate(parts):
            save_record(part, folder / f"{name}-{number:03d}.json")


def package(folder: Path) -> tuple[Usage, Package]:
    """Packages once, by the command that a build runs; what it took, and the record that it wrote."""
    arguments: list[str | Path] = ["--artifact", folder / "model.coldpress", "--output", folder / "package.json"]
    for name in ("model", "corpus", "sparsity", "device", "layout", "placement", "predictors"):
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


def _record_bytes(folder: Path) -> int:
    """About what the artifact will have: all codes."""
    return sum(path.stat().st_size for path in folder.glob(CODES))


@dataclass(frozen=True)
class Case:
    """Medians of some pairs."""

    layers: int
    format: str
    codes: str
    artifact_bytes: int
    package_bytes_per_s: float
    cached_bytes_per_s: float
    direct_bytes_per_s: float
    sha256_bytes_per_s: float
    write_ratio: float
    lowest_ratio: float
    cpu_share: float
    peak_rss_bytes: int


def measure(folder: Path, layers: int, format_name: str, codes: str, pairs: int) -> Case:
    """One case, on records that `prepare` left in `folder`."""
    artifact_bytes = 0
    ratios, rates, shares, peaks, hashing = [], [], [], [], []
    ways: list[tuple[float, float]] = []
    identities: set[str] = set()
    num_bytes = _record_bytes(folder)
    for _ in range(pairs):
        warm(folder) if codes == "hot" else drop(folder)
        ways = ways or [plain_bytes_per_s(folder, num_bytes)]
        took, done = package(folder)
        artifact_bytes = done.artifact_bytes
        shutil.rmtree(folder / "model.coldpress")
        ways.append(plain_bytes_per_s(folder, num_bytes))
        rates.append(artifact_bytes / took.wall_s)
        ratios.append(rates[-1] / max(statistics.mean(way) for way in zip(*ways[-2:], strict=True)))
        shares.append(took.cpu_s / took.wall_s)
        peaks.append(took.peak_rss_bytes)
        hashing.append(sha256_bytes_per_s())
        identities.add(done.manifest_sha256)
    if len(identities) != 1:
        raise RuntimeError(f"{pairs} runs gave {len(identities)} different artifacts")
    return Case(
        layers=layers,
        format=format_name,
        codes=codes,
        artifact_bytes=artifact_bytes,
        package_bytes_per_s=statistics.median(rates),
        cached_bytes_per_s=statistics.median(way[0] for way in ways),
        direct_bytes_per_s=statistics.median(way[1] for way in ways),
        sha256_bytes_per_s=statistics.median(hashing),
        write_ratio=statistics.median(ratios),
        lowest_ratio=min(ratios),
        cpu_share=statistics.median(shares),
        peak_rss_bytes=max(peaks),
    )


def cases(folder: Path, arguments: argparse.Namespace) -> Iterator[Case]:
    """All cases, one checkpoint and one format on the disk at a time."""
    for layers in arguments.layers:
        checkpoint = folder / f"model-{layers}"
        plant = ["--shape", arguments.shape, "--layers", str(layers), "--output", checkpoint]
        measured("-m", "tests.support.planted", *plant, folder=folder)
        for format_name in arguments.formats:
            made = folder / f"{layers}-{format_name}"
            made.mkdir()
            prepared = ["--prepare", made, "--checkpoint", checkpoint, "--formats", format_name]
            measured("-m", MODULE, *prepared, folder=folder)
            for codes in ("hot", "cold"):
                yield measure(made, layers, format_name, codes, arguments.pairs)
            shutil.rmtree(made)
        shutil.rmtree(checkpoint)


def figures(found: list[Case]) -> dict[str, object]:
    """The last line."""
    fewest, most = min(case.layers for case in found), max(case.layers for case in found)
    peak = {
        layers: max(case.peak_rss_bytes for case in found if case.layers == layers and case.codes == "hot")
        for layers in (fewest, most)
    }
    return {
        "write_ratio": min(case.write_ratio for case in found if case.layers == most and case.codes == "hot"),
        "peak_rss_bytes": max(case.peak_rss_bytes for case in found),
        "rss_growth": peak[most] / peak[fewest],
        "rows": [asdict(case) for case in found],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="mistral-7b")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--formats", nargs="+", default=["int4_group32", "fp16"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare, arguments.checkpoint, arguments.formats[0])
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:
        found = []
        for case in cases(Path(folder).resolve(), arguments):
            found.append(case)
        show_cases(arguments.shape, found)
        finish(figures(found))


def show_cases(shape: str, found: list[Case]) -> None:
    """The table."""
    columns = ["layers", "format", "codes", "artifact GB", "package GB/s", "cached GB/s", "direct GB/s", "sha256 GB/s"]
    columns += ["ratio", "lowest", "cores", "RSS MiB"]
    rows = [
        [
            *(case.layers, case.format, case.codes, case.artifact_bytes / 1e9),
            *(case.package_bytes_per_s / 1e9, case.cached_bytes_per_s / 1e9, case.direct_bytes_per_s / 1e9),
            *(case.sha256_bytes_per_s / 1e9, case.write_ratio, case.lowest_ratio, case.cpu_share),
            case.peak_rss_bytes / 2**20,
        ]
        for case in found
    ]
    show(f"package, {shape}", columns, rows)


if __name__ == "__main__":
    main()
