"""Whole builds of a tiny model: what they leave, that they are reproducible, and that a kill leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldpress.compiler.io import load_record, sha256_of
from coldpress.schemas.metrics import Metrics
from tests.support import warm
from tests.support.stages import DEFAULT
from tests.support.workflow import Workflow

PATIENCE_S = 600.0
KILLS = (
    *(("calibrate", 0.3), ("quantize", 0.0), ("predict", 0.2), ("package", 0.05)),
    *(("verify", 0.2), ("publish", 0.0), ("publish", 0.05)),
)
"""Stages and when they are killed; a forked job has nothing to import, and takes a second or less."""


def commands_of(group: int) -> Iterator[list[str]]:
    """The command lines of the live processes of a group."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            same, line = os.getpgid(int(path.name)) == group, (path / "cmdline").read_bytes()
        except OSError:
            continue
        if same and line:
            yield line.decode(errors="replace").split("\0")


def contents(artifact: Path) -> dict[str, str]:
    """Digest of every file of an artifact."""
    return {str(file.relative_to(artifact)): sha256_of(file) for file in sorted(artifact.rglob("*")) if file.is_file()}


def test_a_build_leaves_artifact_report_and_metrics(built: Workflow) -> None:
    metrics = load_record(built.device / "metrics.json", Metrics)
    assert (metrics.model, metrics.device, metrics.format) == ("tiny", "pixel6", "int8_group32")
    assert metrics.flash_bytes_per_token > 0
    assert "<html" in (built.device / "report.html").read_text().lower()
    assert built.identity() == sha256_of(built.artifact / "manifest.json")


def test_nothing_in_the_artifact_names_where_or_when_it_was_built(built: Workflow) -> None:
    for file in built.artifact.rglob("*"):
        if file.is_file():
            assert str(built.folder).encode() not in file.read_bytes()
            assert str(built.tree).encode() not in file.read_bytes()


def test_a_build_ends_with_what_it_gave(built: Workflow) -> None:
    """One that has nothing to do, too, whatever snakemake is told to be quiet about; its last line is a command."""
    metrics = load_record(built.device / "metrics.json", Metrics)
    done = built.run("--quiet", "all")
    said = done.stdout.splitlines()
    assert (done.returncode, said[0]) == (0, "everything is up to date")
    assert f"  identity          {built.identity()}" in said
    assert metrics.num_test_blocks > 1
    assert f"{metrics.num_test_blocks} of {metrics.num_test_blocks} blocks of test text" in done.stdout
    assert metrics.sample is not None
    again = subprocess.run(f"{said[-1]} --json", shell=True, cwd=built.folder, capture_output=True, check=True)
    assert json.loads(again.stdout)["text"] == metrics.sample.text


def test_what_is_no_whole_build_ends_without(built: Workflow) -> None:
    assert built.run("--dry-run").stdout.count("identity") == 0
    part = built.run("--until", "layout")
    assert (part.returncode, part.stdout) == (0, "")


def test_every_rule_logs_and_is_timed(built: Workflow) -> None:
    for stage in DEFAULT:
        assert logs_of(built, stage)
        assert [path for top in tops(built) for path in (top / "benchmarks").glob(f"{stage}*")]


def tops(built: Workflow) -> tuple[Path, Path]:
    return built.device.parent, built.device


@pytest.mark.slow
def test_cores_chunks_shards_folder_and_kills_change_no_byte(built: Workflow, tmp_path: Path) -> None:
    """The same build on one core, in other chunks and shards, elsewhere, and killed in stage after stage."""
    victim = built.at(tmp_path / "elsewhere" / "deeper", layers_per_job=1, calibration_shards=2)
    for stage, delay_s in KILLS:
        kill_during(victim, stage, delay_s)
        assert not victim.artifact.exists() or contents(victim.artifact) == contents(built.artifact)
    warm.build(victim.folder, cores=1, **victim.config)
    assert contents(victim.artifact) == contents(built.artifact)
    assert victim.identity() == built.identity()
    assert not [path for path in victim.folder.rglob("*.tmp") if ".snakemake" not in path.parts]


@pytest.mark.slow
def test_a_build_that_misses_a_gate_publishes_nothing(built: Workflow, tmp_path: Path) -> None:
    """Over a finished build of other settings: that one is kept aside, and the new one is there once it is let."""
    copy = built.at(tmp_path, order="frequency")  # as deep as the build, whose records hold relative paths
    shutil.copytree(built.folder, copy.folder, dirs_exist_ok=True, symlinks=True)
    done = copy.run(max_ppl_ratio=0.5)
    assert done.returncode == 2
    sentence = done.stderr.splitlines()[-1]
    figures = r"perplexity is [\d.]+, [\d.]+ ± [\d.]+ times the source's [\d.]+, expected"
    assert re.match(rf"error: the artifact's {figures}", sentence)
    assert "at most 0.5 (max_ppl_ratio)" in sentence
    assert not copy.artifact.exists()
    assert not [name for name in ("metrics.json", "report.html", "publish.json") if (copy.device / name).exists()]
    aside = copy.device / "earlier" / built.identity()[:12]
    assert contents(aside / copy.artifact.name) == contents(built.artifact)
    assert (aside / "metrics.json").read_bytes() == (built.device / "metrics.json").read_bytes()
    assert set(copy.planned(max_ppl_ratio="off")) == {"preflight", "publish", "report", "all"}
    said = copy.build(max_ppl_ratio="off")
    assert sha256_of(copy.artifact / "manifest.json") == copy.identity() != built.identity()
    assert f"identity          {copy.identity()}" in said
    assert said.splitlines()[-1].split()[1:3] == ["generate", str(copy.artifact.relative_to(copy.folder))]


def kill_during(victim: Workflow, stage: str, delay_s: float) -> None:
    """Starts a build and kills it with all its jobs `delay_s` after `stage` has opened its log."""
    for log in logs_of(victim, stage):
        log.unlink()
    running = warm.start(victim.folder, cores=1, **victim.config)
    deadline = time.monotonic() + PATIENCE_S
    while not logs_of(victim, stage):
        assert time.monotonic() < deadline, f"{stage} did not start"
        time.sleep(0.01)
    time.sleep(delay_s)
    os.killpg(running.group, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL, f"the build ended before {stage} was killed: {running.stderr}"
    while list(commands_of(running.group)):  # until the kernel has taken its jobs away, too
        time.sleep(0.01)


def logs_of(victim: Workflow, stage: str) -> list[Path]:
    folders = [top / "logs" for top in tops(victim)]
    return [log for folder in folders for log in (*folder.glob(f"{stage}.log"), *folder.glob(f"{stage}/*.log"))]
