"""The same build on a Slurm cluster of two nodes: both work, one worker dies, and the artifact is the same."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.workflow import NUM_LAYERS, Workflow

PATIENCE_S = 600.0
CHUNK = f"000-{NUM_LAYERS - 1:03d}"
SETTINGS = (
    # a node of the test has one processor, and its jobs take seconds
    *("--cores", "1", "--default-resources", "mem_mb=1500", "runtime=10"),
    *("--slurm-init-seconds-before-status-checks", "3", "--latency-wait", "5"),
)


@pytest.fixture
def nodes() -> Iterator[slurm.Cluster]:
    if missing := slurm.missing_programs():
        pytest.skip(f"no Slurm on this machine: {', '.join(missing)} not found")
    with slurm.cluster() as found:
        yield found


@pytest.mark.slow
def test_two_nodes_and_a_killed_worker_give_the_local_artifact(
    nodes: slurm.Cluster, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    built: Workflow = request.getfixturevalue("built")  # not before it is known that there is a cluster
    remote = built.at(tmp_path / "remote", layers_per_job=NUM_LAYERS)
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            remote.command("--profile", str(remote.tree / "profiles" / "slurm"), *SETTINGS),
            cwd=remote.folder,
            env={**remote.environment(), **nodes.environment(), "PYTHONPATH": remote.environment()["PYTHONPATH"]},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            finished_layer = kill_between_layers(remote, process)
            assert process.wait(PATIENCE_S) == 0, output.read_text()[-6000:]
        finally:
            process.terminate()
            process.wait()
    jobs = nodes.jobs()
    assert {job.node for job in jobs if job.state == "COMPLETED"} == set(nodes.nodes)
    assert [job.comment for job in jobs if job.state != "COMPLETED"] == [f"rule_predict_wildcards_{CHUNK}"]
    assert identity_of(finished_layer[0]) == finished_layer[1], "a layer that was finished was computed again"
    assert remote.identity() == built.identity()


def kill_between_layers(remote: Workflow, process: subprocess.Popen[bytes]) -> tuple[Path, tuple[int, int]]:
    """Kills `predict` when its first predictor is done; gives the file's final name and its identity."""
    folder, key = remote.device / "predict", "layer-0.rank-32"
    deadline = time.monotonic() + PATIENCE_S
    while not (done := list(folder.glob(f".{CHUNK}.*.work/{key}.done.json"))):  # comes last: without it, it is not done
        assert process.poll() is None, "the build ended before predict was seen"
        assert time.monotonic() < deadline, "predict did not start"
        time.sleep(0.01)
    (worker,) = workers(remote.model, str((folder / f"{CHUNK}.json").relative_to(remote.model)))
    os.kill(worker, signal.SIGKILL)
    return folder / CHUNK / f"{key}.safetensors", identity_of(done[0].with_name(f"{key}.safetensors"))


def workers(folder: Path, output: str) -> list[int]:
    """Ids of the processes that run a stage in `folder` to write the record `output`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            here = (path / "cwd").readlink() == folder
        except OSError:
            continue
        if here and command[1:3] == ["-m", "coldpress.compiler"] and output in command:
            found.append(int(path.name))
    return found


def identity_of(path: Path) -> tuple[int, int]:
    """What changes when a file is written again."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns
