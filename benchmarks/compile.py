"""Measures the whole pipeline at real shapes: time, memory and bound of every stage, extrapolated to all layers.

Snakemake builds a planted checkpoint with this repository's rules on two cores; every job notes its costs
(tests/support/usage_hook). wall_s of a stage is the sum over its jobs, imports included. bound names the resource that
took most of that time: `cpu` (processor seconds over the cores the job may use) or `disk` (bytes that really went to or
from the disk over the rates measured here). It is `waiting` if neither explains half of it: other work on the machine
had its turn. least_s is the time that processor or disk alone needs, whichever is more.

The extrapolation to the shape's own number of layers counts the stages of SHARED once and all others as many times as
it has more layers; a stage whose jobs run on one core each counts by half, since two run at a time. It assumes as many
calibration tokens as were used here, and starts from wall_s or, for a machine that does nothing else, from least_s.

`--smoke` builds a small model, and forks its jobs from a process that has imported the libraries.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.harness.apart import run_likewise
from benchmarks.package import plain_bytes_per_s
from coldpress.schemas.errors import ColdpressError
from tests.support import pipeline, planted, planted_mixtures
from tests.support import warm as warm_builds
from tests.support.data import ROOT

CORES = 2
CONTEXT_LENGTH = 512
SHARED = ("tokenize", "preflight", "device")
"""Stages whose work does not grow with the number of layers; preflight's trial always has two."""
BOTH_CORES = ("preflight", "calibrate", "recalibrate", "size", "package")
IN_CHUNKS = ("predict", "order", "quantize")
"""Stages that run one job per chunk of layers, each on one core."""
BLOCK_BYTES = 4 << 20
SHAPES = planted_mixtures.SHAPES | planted.SHAPES
HOOK = ROOT / "tests" / "support" / "usage_hook"


@dataclass(frozen=True)
class Options:
    shape: str = option("mistral-7b", smoke="small", choices=SHAPES, help="shape of the model")
    layers: int = option(1, smoke=2, full=4, help="layers of the model")
    tokens: int = option(1024, smoke=512, full=2048, help="calibration tokens")
    method: str = option("topk", smoke="relu", full="predictor", help="selector")
    device: str = option("pixel6", help="device profile")
    dram_budget: str = option("80%", smoke="95%", full="60%", help="DRAM budget")
    probe_bytes: int = option(512 << 20, smoke=32 << 20, help="bytes by which the disk is measured")
    warm: bool = option(False, smoke=True, help="fork the jobs, without imports in the time, and score on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].elapsed_s": "seconds of the whole build",
        "rows[].disk_read_bytes_per_s": "the disk's rate of reading",
        "rows[].disk_write_bytes_per_s": "the disk's rate of writing",
        "rows[].stages.*.jobs": "jobs of a stage",
        "rows[].stages.*.wall_s": "their seconds, summed",
        "rows[].stages.*.cpu_s": "their processor seconds, summed",
        "rows[].stages.*.disk_s": "their bytes to and from the disk over its rates",
        "rows[].stages.*.cores": "cores that a job may use",
        "rows[].stages.*.least_s": "what processor and disk alone need",
        "rows[].stages.*.bound": "cpu, disk or waiting",
        "rows[].stages.*.peak_rss_bytes": "the largest memory of a job",
        "extrapolated_layers": "the shape's own number of layers",
        "extrapolated_s": "seconds of so many layers, from wall_s",
        "extrapolated_least_s": "the same from least_s",
        "peak_rss_bytes": "the largest memory of any job",
        "calibration_tokens": "calibration tokens",
    }
    is_timing = True
    full_minutes = 11

    def measure(self, cell: Cell) -> Iterator[Row]:
        options = self.options
        disk = measure_disk(self.folder, options.probe_bytes)
        config: dict[str, Any] = {"device": options.device, "calibration_tokens": options.tokens}
        config |= {"method": options.method, "dram_budget": options.dram_budget}
        config |= {"evaluation_tokens": 512} if options.warm else {}
        text = 4 * options.tokens + 40960
        _, elapsed_s = built(self.folder, options.shape, options.layers, text, options.warm, **config)
        yield {
            "elapsed_s": elapsed_s,
            "disk_read_bytes_per_s": disk.read,
            "disk_write_bytes_per_s": disk.write,
            "stages": {
                name: asdict(stage) | {"least_s": stage.least_s, "bound": stage.bound}
                for name, stage in stages(self.folder, disk).items()
            },
        }

    def figures(self, rows: Rows) -> Figures:
        found, layers = rows[0]["stages"], SHAPES[self.options.shape].num_hidden_layers
        extrapolated = {
            f"extrapolated{kind}_s": extrapolated_s(
                {name: stage[seconds] for name, stage in found.items()}, layers / self.options.layers
            )
            for kind, seconds in (("", "wall_s"), ("_least", "least_s"))
        }
        return extrapolated | {
            "extrapolated_layers": layers,
            "peak_rss_bytes": max(stage["peak_rss_bytes"] for stage in found.values()),
            "calibration_tokens": self.options.tokens,
        }


def built(
    folder: Path, shape: str, layers: int, corpus_tokens: int, is_warm: bool, **config: Any
) -> tuple[Path, float]:
    """Plants and builds a model, its jobs forked from a warm process or not; returns (the device's folder, seconds)."""
    model, notes = folder / "model", folder / "notes"
    notes.mkdir(parents=True)
    plant(model, shape, layers, corpus_tokens)
    start_s = time.perf_counter()
    config |= {"model": model, "corpus": model / "corpus.jsonl", "context_length": CONTEXT_LENGTH}
    with noting(notes):
        target = (warm_builds if is_warm else pipeline).build(folder, cores=CORES, **config)
    return target, time.perf_counter() - start_s


def plant(model: Path, shape: str, layers: int, corpus_tokens: int) -> None:
    """Writes a checkpoint and its text in another process, since this one does not import torch."""
    writer = "planted" if shape in planted.SHAPES else "planted_mixtures"
    command = [sys.executable, "-m", f"tests.support.{writer}", "--shape", shape, "--output", str(model)]
    command += ["--layers", str(layers), "--corpus-tokens", str(corpus_tokens)]
    if run_likewise(command):
        raise ColdpressError("the checkpoint could not be planted")


@dataclass(frozen=True)
class Disk:
    """Sequential rates of the disk in bytes per second."""

    read: float
    write: float


def measure_disk(folder: Path, num_bytes: int) -> Disk:
    """Measures plain writes, the better of both ways, and the reading of a file that the page cache has dropped."""
    path, block = folder / "probe", os.urandom(BLOCK_BYTES)
    with path.open("wb") as file:
        for _ in range(num_bytes // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start_s = time.perf_counter()
    with path.open("rb") as file:
        while file.read(BLOCK_BYTES):
            pass
    read_s = time.perf_counter() - start_s
    path.unlink()
    return Disk(num_bytes / read_s, max(plain_bytes_per_s(folder, num_bytes)))


@contextmanager
def noting(folder: Path) -> Iterator[None]:
    """Makes every job of a pipeline that runs inside leave its note in `folder`."""
    before = dict(os.environ)
    os.environ["COLDPRESS_USAGE"] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HOOK), before.get("PYTHONPATH")]))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True)
class Stage:
    """The costs of a stage, over all its jobs."""

    wall_s: float
    cpu_s: float
    disk_s: float
    """Bytes that went to and from the disk, over its rates."""
    cores: int
    """Cores that a job may use."""
    peak_rss_bytes: int
    jobs: int

    @property
    def least_s(self) -> float:
        """Returns the least seconds that processor and disk allow."""
        return max(self.cpu_s / self.cores, self.disk_s)

    @property
    def bound(self) -> str:
        """Returns the resource that took most of the time: `cpu`, `disk` or `waiting`."""
        if self.least_s < self.wall_s / 2:
            return "waiting"
        return "disk" if self.disk_s > self.cpu_s / self.cores else "cpu"


def stages(folder: Path, disk: Disk) -> dict[str, Stage]:
    """Returns the stages of the build in a folder, in the order in which they ended."""
    jobs = sorted(
        (json.loads(path.read_text()) for path in (folder / "notes").glob("*.json")), key=lambda job: job["stop_s"]
    )
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


def extrapolated_s(seconds: Mapping[str, float], times: float) -> float:
    """Returns the seconds for so many times the layers, from those of each stage, by the rule in the module's
    docstring."""
    return sum(
        stage_s * (1 if name in SHARED else times) / (CORES if name in IN_CHUNKS else 1)
        for name, stage_s in seconds.items()
    )


if __name__ == "__main__":
    main("compile")
