"""One build at a time, held by snakemake itself from its beginning to its end, from wherever it is run."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldpress.compiler.lock import JOBS_FILE, LOCK_FILE
from tests.support.workflow import Workflow

LOOKS = ("--dry-run", "--summary", "--dag", "--unlock")
PATIENCE_S = 600.0


@pytest.fixture
def running(workflow: Workflow, tmp_path: Path) -> Iterator[tuple[Workflow, subprocess.Popen[bytes], tuple[str, int]]]:
    """A build, its process, and stage and process of one of its first jobs, which is stopped."""
    build = workflow.at(tmp_path / "first")
    process = subprocess.Popen(
        build.command(),
        cwd=build.folder,
        env=build.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield build, process, stopped_job(build, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def stopped_job(build: Workflow, process: subprocess.Popen[bytes]) -> tuple[str, int]:
    """Stage and process of a job, stopped as it runs."""
    deadline = time.monotonic() + PATIENCE_S
    jobs = build.model / JOBS_FILE
    while True:
        assert process.poll() is None, "the build ended before a job was stopped"
        assert time.monotonic() < deadline, "no job began"
        for line in jobs.read_text().splitlines() if jobs.exists() else []:
            stage, job, *_ = json.loads(line)
            with contextlib.suppress(OSError):  # it has ended
                os.kill(job, signal.SIGSTOP)
                time.sleep(0.05)
                if Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                    return stage, job
        time.sleep(0.01)


@pytest.mark.slow
def test_a_second_build_is_refused_and_looking_is_not(
    running: tuple[Workflow, subprocess.Popen[bytes], tuple[str, int]], tmp_path: Path
) -> None:
    build, process, (stage, job) = running
    elsewhere = build.at(tmp_path / "second", build_dir=build.folder / "build", format="fp16")
    for other in (build, elsewhere):
        done = other.run("--quiet", "all")
        assert done.returncode == 2
        said = f"error: another build of tiny runs, process {process.pid}, since "
        assert done.stderr.splitlines()[-1].startswith(said)
    for look in LOOKS:
        done = build.run(look)
        assert done.returncode == 0, (look, done.stderr)
    assert process.poll() is None
    process.kill()
    process.wait()
    done = elsewhere.run()
    assert done.returncode == 2, "the job of the killed build would write into this one"
    assert f"error: a job of an earlier build of tiny still runs, {stage}, process {job}, since " in done.stderr
    os.kill(job, signal.SIGKILL)
    done = elsewhere.run("--until", "device")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_build_that_has_nothing_to_do_waits_for_its_turn_too(built: Workflow) -> None:
    """What it found done may be in the course of change."""
    holder = 'flock --nonblock --no-fork {} sh -c "echo held; exec sleep 600"'
    with subprocess.Popen(shlex.split(holder.format(built.model / LOCK_FILE)), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            done = built.run()
        finally:
            process.kill()
    assert done.returncode == 2
    assert "error: another build of tiny runs" in done.stderr
    assert built.run().returncode == 0
