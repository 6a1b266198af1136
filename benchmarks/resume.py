"""SIGKILL at random moments of a build: every rerun completes, loses little, and gives the same artifact.

`python -m benchmarks.resume [--kills 20] [--kills-per-build 4] [--seed 0]`. A planted model of Mistral's
structure with 12 layers is built once undisturbed; that build gives the artifact and the time it takes. Then others are
built from scratch. The whole process group of a build (snakemake and its jobs) is killed at moments drawn uniformly
from the time that an undisturbed build takes; what is left is run again, which is killed at the next moment, and so on
up to `--kills-per-build` times; then the build runs to its end. So every kill is followed by a rerun, and 20 kills take
five builds. A build that ends before its next kill makes room for another one.

Counted per kill and stage are the layers computed twice: those whose array files were whole at the kill and were
written again by the next run (inode or time changed), and the one that each job was at. A chunk is `layers_per_job` of
them. A stage that works on the whole model is one chunk: repeated if it ran at the kill, or if its record was there and
was written again. The last line is {kills, completed, identical, max_repeated_chunks}: `completed` are the kills whose
build was brought to its end, `identical` says whether all their artifacts have the undisturbed one's files to the byte.
"""

import argparse
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.report import finish, show
from coldpress.compiler.io import sha256_of
from tests.support.pipeline import build, command, environment, snakemake
from tests.support.planted import plant_of, write

LAYERS, LAYERS_PER_JOB = 12, 3
LAYERWISE = ("calibrate", "recalibrate", "predict", "order", "quantize")
"""Stages that keep an array file per layer; the others work on the whole model."""
LAYER_OF_FILE = re.compile(r"(?:layer-)?(\d+)(?:\..*)?")
PLANT: dict[str, Any] = {
    "model_type": "mistral",
    "intermediate_size": 896,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
DEVICE = "pixel6"

Snapshot = dict[Path, tuple[int, int]]
"""Record or array file -> inode and time of its last change."""


@dataclass(frozen=True)
class Kill:
    """One kill, and what the run after it did twice."""

    build: int
    after_s: float
    """Since the start of the run that was killed."""
    running: list[str]
    """The jobs that were running, as `predict 003-005`."""
    repeated: dict[str, int] = field(default_factory=dict)
    """Stage -> chunks."""


@dataclass(frozen=True)
class Subject:
    """What is built: the same every time."""

    config: dict[str, Any]
    undisturbed_s: float
    start_s: float
    """What a run takes before its first job."""
    files: dict[str, str]
    """The artifact's files by their digests."""


def measure(folder: Path) -> Subject:
    """Writes the model and builds it undisturbed."""
    plant = plant_of("small", layers=LAYERS, **PLANT)
    model = write(plant, folder / "model", corpus_tokens=40960)
    config: dict[str, Any] = {
        "model": model,
        "corpus": model / "corpus.jsonl",
        "device": DEVICE,
        "dram_budget": "60%",
        "context_length": 256,
        "calibration_tokens": 8192,
        "layers_per_job": LAYERS_PER_JOB,
    }
    start = time.monotonic()
    build(folder / "undisturbed", **config)
    undisturbed_s = time.monotonic() - start
    snakemake(folder / "undisturbed", **config)  # which finds nothing to do
    return Subject(
        config, undisturbed_s, time.monotonic() - start - undisturbed_s, artifact_files(folder / "undisturbed")
    )


def artifact_files(folder: Path) -> dict[str, str]:
    """Every file of the artifact, by its digest."""
    (artifact,) = folder.glob(f"build/*/{DEVICE}/*.coldpress")
    return {str(file.relative_to(artifact)): sha256_of(file) for file in sorted(artifact.rglob("*")) if file.is_file()}


def disturb(subject: Subject, folder: Path, number: int, fractions: np.ndarray) -> tuple[list[Kill], bool]:
    """Builds in `folder`, killed at ascending `fractions` of an undisturbed build; (kills, whether it is identical)."""
    kills: list[Kill] = []
    folder.mkdir(parents=True)
    before = 0.0
    known: Snapshot = {}
    for fraction in fractions:
        delay_s = (fraction - before) * subject.undisturbed_s + (subject.start_s if kills else 0.0)
        running = run_and_kill(subject, folder, delay_s)
        if running is None:
            break
        now = snapshot(folder)
        settle(kills, known, now)
        kills.append(Kill(number, delay_s, running))
        before, known = fraction, now
    build(folder, **subject.config)
    settle(kills, known, snapshot(folder))
    return kills, artifact_files(folder) == subject.files


def run_and_kill(subject: Subject, folder: Path, delay_s: float) -> list[str] | None:
    """Kills a run after `delay_s`; gives the jobs that were running, or None if it had ended before."""
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            command(**subject.config),
            cwd=folder,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(delay_s)
        except subprocess.TimeoutExpired:
            running = [job for _, job in jobs_of(process.pid)]
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            while list(jobs_of(process.pid)):  # until the kernel has taken them away
                time.sleep(0.01)
            return sorted(running)
    if process.returncode:
        raise RuntimeError(f"a rerun ended with {process.returncode}: {(folder / 'output.txt').read_text()[-4000:]}")
    return None


def jobs_of(group: int) -> Iterator[tuple[int, str]]:
    """(process id, job) of the stages that run in a process group."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            same = os.getpgid(int(path.name)) == group
        except OSError:
            continue
        if same and words[1:3] == ["-m", "coldpress.compiler"]:
            output = Path(words[words.index("--output") + 1])
            yield int(path.name), f"{words[3]} {output.stem}" if output.stem != words[3] else words[3]


def snapshot(folder: Path) -> Snapshot:
    """Records and array files that are whole, the artifact's own left out."""
    found: Snapshot = {}
    for path in (folder / "build").rglob("*"):
        if path.suffix not in (".json", ".safetensors") or path.name.startswith((".", "hidden.")):
            continue
        parts = path.relative_to(folder).parts
        if "artifact" not in parts and not any(part.endswith((".coldpress", ".tmp")) for part in parts):
            status = path.stat()
            found[path.relative_to(folder)] = (status.st_ino, status.st_mtime_ns)
    return found


def settle(kills: list[Kill], before: Snapshot, after: Snapshot) -> None:
    """Writes into the last kill what the run after it did twice."""
    if not kills:
        return
    running = [job.split() for job in kills[-1].running]
    written_again = [path for path, identity in before.items() if after.get(path, identity) != identity]
    stages = {job[0] for job in running} | {stage_of(path) for path in written_again}
    for stage in stages - {"device"}:
        paths = [path for path in written_again if stage_of(path) == stage]
        if stage in LAYERWISE:
            layers = {layer for path in paths if (layer := layer_of(path)) is not None}
            count = len(layers) + sum(job[0] == stage for job in running)
            kills[-1].repeated[stage] = -(-count // LAYERS_PER_JOB)
        else:
            kills[-1].repeated[stage] = 1


def stage_of(path: Path) -> str:
    """`build/small/pixel6/predict/000-002/layer-0.rank-32.safetensors` belongs to predict, as does `…/predict.json`."""
    parts = path.parts[3:] if path.parts[2] == DEVICE else path.parts[2:]
    return Path(parts[0]).stem


def layer_of(path: Path) -> int | None:
    """The layer of an array file; None for a record, and for what all layers share."""
    found = LAYER_OF_FILE.fullmatch(path.stem)
    return int(found[1]) if found and path.suffix == ".safetensors" else None


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kills-per-build", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    kills: list[Kill] = []
    identical, number = True, 0
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        subject = measure(folder)
        print(f"undisturbed: {subject.undisturbed_s:.0f} s, {subject.start_s:.1f} s before the first job", flush=True)
        while len(kills) < arguments.kills:
            number += 1
            wanted = min(arguments.kills_per_build, arguments.kills - len(kills))
            found, same = disturb(subject, folder / str(number), number, np.sort(rng.random(wanted)))
            kills += found
            identical = identical and same
            print(f"build {number}: {len(found)} kills, {'identical' if same else 'another artifact'}", flush=True)
    show(
        "kills",
        ("build", "after s", "running", "repeated chunks"),
        ((kill.build, kill.after_s, ", ".join(kill.running) or "no job", counts(kill.repeated)) for kill in kills),
    )
    finish(
        {
            "kills": len(kills),
            "completed": len(kills),  # a build that does not complete ends the benchmark with an error
            "identical": identical,
            "max_repeated_chunks": max((count for kill in kills for count in kill.repeated.values()), default=0),
        }
    )


def counts(repeated: dict[str, int]) -> str:
    """`order 1, place 1`."""
    return ", ".join(f"{stage} {count}" for stage, count in sorted(repeated.items())) or "none"


if __name__ == "__main__":
    main()
