"""The whole pipeline at 7B scale: time and memory of every stage, what bounds it, and what 32 layers would take.

`python -m benchmarks.compile [--shape mistral-7b] [--layers 4] [--tokens 2048] [--keep FOLDER]`. A planted
checkpoint is built by snakemake with this repository's rules on two cores; every job notes what it took
(tests/support/usage_hook). wall_s of a stage is the sum over its jobs, imports included. bound is what most of that
time went to: `cpu` (processor seconds over the cores the job may use) or `disk` (bytes that really went to or from the
disk over the rates measured here), `waiting` if neither explains half of it: other work on the machine had its turn.
least_s is what processor and disk alone need, whichever is more.

The extrapolation to 32 layers: stages named in SHARED are counted once, all others by 32 / layers; a stage whose jobs
run on one core each counts by half, since two run at a time. It is for as many calibration tokens as were used here,
from wall_s and, for a machine that does nothing else, from least_s.
The last line is {stages: {stage: {wall_s, least_s, cpu_s, peak_rss_bytes, bound}}, extrapolated_32_layers_s,
extrapolated_32_layers_least_s, …}.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.package import plain_bytes_per_s
from benchmarks.shared.report import finish, show
from tests.support.data import ROOT
from tests.support.pipeline import build
from tests.support.usage import measured

CORES = 2
TARGET_LAYERS = 32
SHARED = ("tokenize", "preflight", "device")
"""Stages whose work does not grow with the number of layers; preflight's trial is always of two."""
BOTH_CORES = ("preflight", "calibrate", "recalibrate", "size", "package")
IN_CHUNKS = ("predict", "order", "quantize")
"""Stages whose jobs have one core and some layers each."""
PROBE_BYTES = 512 << 20
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Disk:
    """Sequential rates in bytes per second."""

    read: float
    write: float


def measure_disk(folder: Path) -> Disk:
    """Of plain writes, the better of both ways; of reading a file after the page cache has let it go."""
    path, block = folder / "probe", os.urandom(BLOCK_BYTES)
    with path.open("wb") as file:
        for _ in range(PROBE_BYTES // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    with path.open("rb") as file:
        while file.read(BLOCK_BYTES):
            pass
    read_s = time.perf_counter() - start
    path.unlink()
    return Disk(PROBE_BYTES / read_s, max(plain_bytes_per_s(folder, PROBE_BYTES)))


@contextmanager
def noting(folder: Path) -> Iterator[None]:
    """Has every job of a pipeline run within leave its note in `folder`."""
    before = dict(os.environ)
    hook = str(ROOT / "tests" / "support" / "usage_hook")
    os.environ["COLDPRESS_USAGE"] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [hook, before.get("PYTHONPATH")]))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True)
class Stage:
    """What the jobs of a stage took together."""

    wall_s: float
    cpu_s: float
    disk_s: float
    """Bytes that went to and from the disk, over its rates."""
    cores: int
    """That a job may use."""
    peak_rss_bytes: int
    jobs: int

    @property
    def least_s(self) -> float:
        """What it would take at least."""
        return max(self.cpu_s / self.cores, self.disk_s)

    @property
    def bound(self) -> str:
        """What most of the time went to."""
        if self.least_s < self.wall_s / 2:
            return "waiting"
        return "disk" if self.disk_s > self.cpu_s / self.cores else "cpu"


def stages(notes: Path, disk: Disk) -> dict[str, Stage]:
    """The stages in the order in which they ended."""
    jobs = sorted((json.loads(path.read_text()) for path in notes.glob("*.json")), key=lambda job: job["stop_s"])
    found: dict[str, Stage] = {}
    for name in dict.fromkeys(job["stage"] for job in jobs):
        mine = [job for job in jobs if job["stage"] == name]
        wall_s = sum(job["stop_s"] - job["start_s"] for job in mine)
        disk_s = sum(job["disk_read_bytes"] / disk.read + job["disk_write_bytes"] / disk.write for job in mine)
        found[name] = Stage(
            wall_s=wall_s,
            cpu_s=sum(job["cpu_s"] for job in mine),
            disk_s=disk_s,
            cores=CORES if name in BOTH_CORES else 1,
            peak_rss_bytes=max(job["peak_rss_bytes"] for job in mine),
            jobs=len(mine),
        )
    return found


def extrapolated_s(seconds: dict[str, float], layers: int) -> float:
    """Seconds for TARGET_LAYERS layers from those of each stage, by the rule of the module's text."""
    return sum(
        stage_s * (1 if name in SHARED else TARGET_LAYERS / layers) / (CORES if name in IN_CHUNKS else 1)
        for name, stage_s in seconds.items()
    )


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Prints the table; gives the figures."""
    model, notes = folder / "model", folder / "notes"
    notes.mkdir(parents=True)
    disk = measure_disk(folder)
    plant = ["--shape", arguments.shape, "--layers", str(arguments.layers), "--output", model]
    measured("-m", "tests.support.planted", *plant, "--corpus-tokens", str(4 * arguments.tokens + 40960), folder=folder)
    start = time.perf_counter()
    with noting(notes):
        build(
            folder,
            cores=CORES,
            model=model,
            device=arguments.device,
            corpus=model / "corpus.jsonl",
            calibration_tokens=arguments.tokens,
            context_length=512,
            dram_budget=arguments.dram_budget,
        )
    elapsed_s = time.perf_counter() - start
    found = stages(notes, disk)
    columns = ["stage", "jobs", "wall s", "cpu s", "disk s", "least s", "bound", "peak RSS GiB"]
    rows = [
        [
            *(name, stage.jobs, stage.wall_s, stage.cpu_s, stage.disk_s, stage.least_s, stage.bound),
            stage.peak_rss_bytes / 2**30,
        ]
        for name, stage in found.items()
    ]
    show(f"{arguments.shape}, {arguments.layers} layers, {arguments.tokens} calibration tokens", columns, rows)
    return {
        "stages": {
            name: {key: getattr(stage, key) for key in ("wall_s", "least_s", "cpu_s", "peak_rss_bytes", "bound")}
            for name, stage in found.items()
        },
        "elapsed_s": elapsed_s,
        "extrapolated_32_layers_s": extrapolated_s(
            {name: stage.wall_s for name, stage in found.items()}, arguments.layers
        ),
        "extrapolated_32_layers_least_s": extrapolated_s(
            {name: stage.least_s for name, stage in found.items()}, arguments.layers
        ),
        "calibration_tokens": arguments.tokens,
        "disk_read_bytes_per_s": disk.read,
        "disk_write_bytes_per_s": disk.write,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="mistral-7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="pixel6")
    parser.add_argument("--dram-budget", default="60%")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="build there and leave it, for a look")
    arguments = parser.parse_args()
    if arguments.keep:
        finish(measure(arguments, arguments.keep.resolve()))
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:
        finish(measure(arguments, Path(folder).resolve()))


if __name__ == "__main__":
    main()
