"""Runs a small Slurm cluster on this machine, for tests: `with cluster() as nodes: …`.

Every node is one slurmd on this host. Key, socket, state and logs lie in one new folder in the system's temporary
folder, because a Unix socket's path must be short. The daemons are children of this process: leaving the block ends
them and no others. The cluster needs neither root nor systemd nor an accounting database, only Slurm's programs.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel")
READY_S = 30.0
NODE_MEMORY_MB = 4000


@dataclass(frozen=True)
class Job:
    """A job that the cluster has seen."""

    name: str
    node: str
    state: str
    comment: str
    """Snakemake's plugin writes the rule and its wildcards here."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    folder: Path
    nodes: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """Returns an environment in which Slurm's commands talk to this cluster."""
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def ask(self, *command: str) -> str:
        """Runs a Slurm command and returns its standard output."""
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=False)
        return done.stdout

    def jobs(self) -> list[Job]:
        """Returns all jobs so far, finished ones included."""
        lines = self.ask("squeue", "--states=all", "--noheader", "--format=%j\t%N\t%T\t%k").splitlines()
        return [Job(*line.split("\t", 3)) for line in lines]


def missing_programs() -> list[str]:
    """Returns the programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if _find(name) is None]


def _find(name: str) -> str | None:
    """Finds a program; daemons lie in folders that many users do not have in PATH."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


@contextlib.contextmanager
def cluster(num_nodes: int = 2) -> Iterator[Cluster]:
    """Starts a cluster of `num_nodes` idle nodes with one processor each, and ends it after the block.

    Raises:
        RuntimeError: if it is not ready in time; the text has the ends of the daemons' logs.
    """
    folder = Path(tempfile.mkdtemp(prefix="coldpress-slurm-"))
    folder.chmod(0o755)  # munge refuses a socket that other users cannot reach
    found = Cluster(folder, tuple(f"node{number}" for number in range(num_nodes)))
    running: list[subprocess.Popen[bytes]] = []
    try:
        _write(found)
        for command in _daemons(found):
            running.append(_start(found, command, f"{len(running)}-{Path(command[0]).name}"))
            if command[0].endswith("munged"):
                _wait(found, running, (folder / "munge.socket").exists)
        _wait(found, running, lambda: found.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(num_nodes))
        yield found
    finally:
        if running:
            found.ask("scancel", "--full", "--user", getuser())
        for process in reversed(running):
            _stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def _daemons(found: Cluster) -> list[list[str]]:
    """Returns the daemons' commands, which stay in the foreground, in starting order."""
    folder = found.folder
    munged = ["munged", "--foreground", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munged += [f"--{kind}-file={folder}/munge.{kind}" for kind in ("pid", "seed", "log")]
    commands = [munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in found.nodes)]
    return [[_find(command[0]) or command[0], *command[1:]] for command in commands]


def _start(found: Cluster, command: list[str], name: str) -> subprocess.Popen[bytes]:
    with (found.folder / "log" / f"{name}.out").open("ab") as output:
        return subprocess.Popen(
            command,
            env=found.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the test, which then ends them in order
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _wait(found: Cluster, running: list[subprocess.Popen[bytes]], ready: Callable[[], bool]) -> None:
    """Waits until `ready()` is true; raises RuntimeError if a daemon ends or READY_S is over."""
    deadline = time.monotonic() + READY_S
    while not ready():
        ended = [process.args for process in running if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in (found.folder / "log").iterdir())
            raise RuntimeError(f"the Slurm cluster did not start; ended by themselves: {ended}\n{logs}")
        time.sleep(0.1)


def _write(found: Cluster) -> None:
    """Writes the key, the configuration, and an srun that knows the cluster."""
    folder = found.folder
    for name in ("bin", "log", "state"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(_configuration(found, _free_ports(1 + len(found.nodes))))
    # Snakemake's job step drops all SLURM_* variables before it calls srun, SLURM_CONF with them.
    srun = folder / "bin" / "srun"
    srun.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {_find("srun")} "$@"\n')
    srun.chmod(0o755)


def _free_ports(count: int) -> list[int]:
    """Returns free TCP ports; binds all of them before it closes any, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _configuration(found: Cluster, ports: list[int]) -> str:
    folder, host, user = found.folder, socket.gethostname().split(".")[0], getuser()
    settings = {
        "ClusterName": "coldpress",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge.socket",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool.%n",
        "SlurmctldPidFile": f"{folder}/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
        # Processes are tracked by their parents and not accounted: containers may not create cgroups.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "SlurmdParameters": "config_overrides",
        "SchedulerParameters": "batch_sched_delay=0",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        # Finished jobs stay visible to squeue, which replaces an accounting database.
        "MinJobAge": 3600,
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    for node, port in zip(found.nodes, ports[1:], strict=True):
        lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1")
        lines[-1] += f" RealMemory={NODE_MEMORY_MB}"
    # LLN: the least loaded node goes first, so that two jobs at a time run on two nodes.
    lines.append(f"PartitionName=main Nodes={','.join(found.nodes)} Default=YES MaxTime=INFINITE State=UP LLN=YES")
    return "\n".join(lines) + "\n"
