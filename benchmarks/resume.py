"""Kills a build with SIGKILL at random moments: every rerun completes, loses little, and gives the same artifact.

A planted model of Mistral's structure is built once undisturbed; that build gives the artifact and the time it takes.
Then others are built from scratch. The whole process group of a build (snakemake and its jobs) is killed at moments
drawn uniformly from the time of an undisturbed build. The build is started again after each kill, and runs to its end
after the last one; so every kill is followed by a rerun. A build that ends before its next kill has fewer.

Each kill counts, by stage, the layers computed twice: those whose array files were whole at the kill and were written
again by the next run (inode or time changed), and the one that each job was at. A chunk is `layers_per_job` of them. A
stage that works on the whole model is one chunk: repeated if it ran at the kill, or if its record was there and was
written again.

Snakemake and its jobs are forked from processes that have imported the libraries. `--smoke` builds as far as the
package, without verifying and publishing it.
"""

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.builds import artifact_in
from tests.support import warm
from tests.support.planted import plant_of, write
from tests.support.records import contents

LAYERWISE = ("calibrate", "recalibrate", "predict", "order", "quantize")
"""Stages that keep an array file per layer; the others work on the whole model."""
LAYER_OF_FILE = re.compile(r"(?:layer-)?(\d+)(?:\..*)?")
PLANT: dict[str, Any] = {
    "model_type": "mistral",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
DEVICE = "pixel6"

Snapshot = dict[Path, tuple[int, int]]
"""Record or array file -> (inode, time of its last change in ns)."""


@dataclass(frozen=True)
class Options:
    builds: int = option(1, smoke=1, full=5, help="number of builds with kills")
    kills_per_build: int = option(3, smoke=1, full=4, help="kills per build")
    layers: int = option(12, smoke=2, help="layers of the model")
    intermediate_size: int = option(896, smoke=128, help="neurons per layer")
    layers_per_job: int = option(3, smoke=1, help="layers per chunk")
    calibration_tokens: int = option(1024, smoke=512, full=8192, help="tokens of calibration text")
    dram_budget: str = option("60%", smoke="95%", help="value of dram_budget=")
    method: str = option("predictor", smoke="relu", full="auto", help="value of method=")
    until: str = option("report", smoke="package", help="last stage of a build")
    seed: int = option(0, help="seed of the random moments")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].after_s?": "seconds from a run's start to its kill; null if the build ended before any kill",
        "rows[].running": "jobs that ran at the kill, such as `predict 003-005`",
        "rows[].repeated.*?": "chunks that the next run computed again, by stage",
        "rows[].identical": "whether every file of the artifact equals the undisturbed build's, byte for byte",
        "kills": "number of kills",
        "completed": "kills whose build was completed by later runs",
        "identical": "whether all artifacts are identical to the undisturbed one",
        "max_repeated_chunks": "most chunks of one stage that a kill cost",
        "rows[].undisturbed_s": "seconds of an undisturbed build",
    }
    over = {"build": "builds"}
    full_minutes = 10

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per kill; a build that does not complete is an error."""
        subject = self.once("subject", lambda: subject_of(self.folder, self.options))
        random = np.random.default_rng([self.options.seed, cell["build"]])
        fractions = np.sort(random.random(self.options.kills_per_build)).tolist()
        kills, identical = disturb(subject, self.folder / str(cell["build"]), fractions)
        for kill in kills or [{"after_s": None, "running": [], "repeated": {}}]:
            yield kill | {"identical": identical, "undisturbed_s": subject.undisturbed_s}

    def figures(self, rows: Rows) -> Figures:
        kills = sum(row["after_s"] is not None for row in rows)
        return {
            "kills": kills,
            "completed": kills,
            "identical": all(row["identical"] for row in rows),
            "max_repeated_chunks": max((count for row in rows for count in row["repeated"].values()), default=0),
        }


@dataclass(frozen=True)
class Subject:
    """The build under test, the same every time."""

    config: dict[str, Any]
    until: str
    undisturbed_s: float
    start_s: float
    """Seconds that a run takes before its first job, measured by a dry run."""
    files: dict[str, str]
    """The artifact's files: relative path -> sha256."""


def subject_of(folder: Path, options: Options) -> Subject:
    """Writes the model and builds it undisturbed."""
    warm.begin()
    plant = plant_of("small", layers=options.layers, intermediate_size=options.intermediate_size, **PLANT)
    model = write(plant, folder / "model", corpus_tokens=40960)
    config: dict[str, Any] = {
        "model": model,
        "corpus": model / "corpus.jsonl",
        "device": DEVICE,
        "dram_budget": options.dram_budget,
        "context_length": 256,
        "method": options.method,
        "calibration_tokens": options.calibration_tokens,
        "layers_per_job": options.layers_per_job,
    }
    warm.ready()
    start_s = time.monotonic()
    warm.start(folder / "undisturbed", "--dry-run", **config).wait()
    planned_s = time.monotonic()
    device = warm.build(folder / "undisturbed", "--until", options.until, **config)
    undisturbed_s = time.monotonic() - planned_s
    return Subject(config, options.until, undisturbed_s, planned_s - start_s, contents(artifact_in(device)))


def disturb(subject: Subject, folder: Path, fractions: Sequence[float]) -> tuple[list[Row], bool]:
    """Builds in `folder` with kills at ascending `fractions` of the time; returns (kills, whether files are equal)."""
    kills, before = list[Row](), 0.0
    known: Snapshot = {}
    for fraction in fractions:
        delay_s = (fraction - before) * subject.undisturbed_s + (subject.start_s if kills else 0.0)
        running = run_and_kill(subject, folder, delay_s)
        if running is None:
            break
        now = snapshot(folder)
        settle(kills, known, now, subject.config["layers_per_job"])
        kills.append({"after_s": delay_s, "running": running, "repeated": {}})
        before, known = fraction, now
    device = warm.build(folder, "--until", subject.until, **subject.config)
    settle(kills, known, snapshot(folder), subject.config["layers_per_job"])
    return kills, contents(artifact_in(device)) == subject.files


def run_and_kill(subject: Subject, folder: Path, delay_s: float) -> list[str] | None:
    """Kills a run after `delay_s`; returns the jobs that were running, or None if it had ended before."""
    running = warm.start(folder, "--until", subject.until, **subject.config)
    try:
        code = running.wait(delay_s)
    except TimeoutError:
        jobs = sorted(filter(None, map(job_of, commands_of(running.group))))
        os.killpg(running.group, signal.SIGKILL)
        while list(commands_of(running.group)):  # until the kernel has removed them
            time.sleep(0.01)
        return jobs
    if code:
        raise RuntimeError(f"a rerun ended with {code}: {running.said()[-4000:]}")
    return None


def commands_of(group: int) -> Iterator[list[str]]:
    """Yields the command lines of the live processes of a group."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            same, line = os.getpgid(int(path.name)) == group, (path / "cmdline").read_bytes()
        except OSError:
            continue
        if same and line:
            yield line.decode(errors="replace").split("\0")


def job_of(words: Sequence[str]) -> str | None:
    """Returns the job of a command line, as `predict 003-005`; None if it is no job."""
    if "coldpress.compiler" not in words:
        return None
    stage, output = words[words.index("coldpress.compiler") + 1], Path(words[words.index("--output") + 1])
    return f"{stage} {output.stem}" if output.stem != stage else stage


def snapshot(folder: Path) -> Snapshot:
    """Returns the records and array files that are whole, without the artifact's own."""
    found: Snapshot = {}
    for path in (folder / "build").rglob("*"):
        if path.suffix not in (".json", ".safetensors") or path.name.startswith((".", "hidden.")):
            continue
        parts = path.relative_to(folder).parts
        if "artifact" not in parts and not any(part.endswith((".coldpress", ".tmp")) for part in parts):
            status = path.stat()
            found[Path(*map(final_name, parts))] = (status.st_ino, status.st_mtime_ns)
    return found


def final_name(part: str) -> str:
    """Returns the name that a stage's working folder gets at its end; other names stay."""
    working = re.fullmatch(r"\.(.+)\.[0-9a-f]+\.work", part)
    return working[1] if working else part


def settle(kills: Rows, before: Snapshot, after: Snapshot, layers_per_job: int) -> None:
    """Writes into the last kill the chunks that the run after it repeated."""
    if not kills:
        return
    running = [job.split()[0] for job in kills[-1]["running"]]
    written_again = [path for path, identity in before.items() if after.get(path, identity) != identity]
    for stage in {*running, *map(stage_of, written_again)} - {"device"}:
        chunks = 1
        if stage in LAYERWISE:
            layers = {layer_of(path) for path in written_again if stage_of(path) == stage} - {None}
            chunks = -(-(len(layers) + running.count(stage)) // layers_per_job)
        kills[-1]["repeated"][stage] = chunks


def stage_of(path: Path) -> str:
    """Returns the stage of a file: predict for `build/small/pixel6/predict/000-002/layer-0.rank-32.safetensors`."""
    parts = path.parts[3:] if path.parts[2] == DEVICE else path.parts[2:]
    return Path(parts[0]).stem


def layer_of(path: Path) -> int | None:
    """Returns the layer of an array file; None for a record and for a file that all layers share."""
    found = LAYER_OF_FILE.fullmatch(path.stem)
    return int(found[1]) if found and path.suffix == ".safetensors" else None


if __name__ == "__main__":
    main("resume")
