"""Runs real builds without the time of imports: snakemake and its jobs are forked from warm processes.

Rules, command lines, locks and processes are those of any build; only no interpreter is started. Benchmarks that
measure a build's time or memory use tests/support/pipeline.py.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coldpress.schemas.errors import ColdpressError
from tests.support.data import ROOT
from tests.support.pipeline import command, environment, target

SERVERS = "WARM_SERVERS"
"""Environment variable with the servers' name, in processes that were forked from them."""
CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect("\\0{name}")
socket.send_fds(server, [b"."], [0, 1, 2])
request = {{"module": sys.argv[2], "arguments": sys.argv[3:], "folder": os.getcwd(), "environment": dict(os.environ)}}
server.sendall(json.dumps(request | {{"group": os.getpgrp()}}).encode())
server.shutdown(socket.SHUT_WR)
told = server.makefile().read().split()
sys.exit(int(told[2]) if len(told) == 3 else 1)
"""


class Running:
    """A running snakemake, in a process group with its jobs."""

    def __init__(self, connection: socket.socket, errors: Path) -> None:
        """Takes the connection that reports ids and exit code, and the file of standard error."""
        self._connection, self._errors = connection, errors
        self.pid, self.group = map(int, self._line().split())

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for its end and returns its exit code; call this once.

        Raises:
            TimeoutError: if it still runs after `timeout_s`.
        """
        if not select.select([self._connection], [], [], timeout_s)[0]:
            raise TimeoutError
        with self._connection:
            return int(self._line() or -signal.SIGKILL)

    @property
    def stdout(self) -> str:
        """Its standard output so far."""
        return self._errors.with_suffix(".out").read_text()

    @property
    def stderr(self) -> str:
        """Its standard error so far."""
        return self._errors.read_text()

    def said(self) -> str:
        """Returns standard output, then standard error, so far."""
        return self.stdout + self.stderr

    def _line(self) -> str:
        line = b""
        while not line.endswith(b"\n") and (piece := self._connection.recv(1)):
            line += piece
        return line.decode()


def start(
    folder: Path, *arguments: str, cores: int = 2, more: Mapping[str, str] | None = None, **config: Any
) -> Running:
    """Starts a build in `folder`; `more` adds to its environment."""
    folder.mkdir(parents=True, exist_ok=True)
    return _told_to(folder, ready(), command(*arguments, cores=cores, **config), folder, dict(more or {}))


def start_module(scratch: Path, *command: str) -> Running:
    """Starts `python -m` with a command line in the checkout; its builds use the same warm processes."""
    return _told_to(scratch, f"{ready()}-jobs", ("python", "-m", *command), ROOT, {SERVERS: ready()})


def _told_to(scratch: Path, server: str, told: Sequence[str], folder: Path, more: Mapping[str, str]) -> Running:
    """Sends a command line to a server; its output goes to files in `scratch`."""
    errors = Path(tempfile.mkstemp(".err", dir=scratch)[1])
    with open(os.devnull) as nothing, errors.with_suffix(".out").open("w") as output, errors.open("w") as error:
        streams = nothing.fileno(), output.fileno(), error.fileno()
        return Running(_asked(server, told, streams, folder, environment() | dict(more)), errors)


def run(command: Sequence[str]) -> int:
    """Runs `python -m MODULE …` in a warm process, for benchmarks/harness/apart.py; returns its exit code."""
    streams = 0, sys.stdout.fileno(), sys.stderr.fileno()
    return Running(_asked(f"{ready()}-jobs", command, streams, ROOT, environment()), Path(os.devnull)).wait()


def _asked(
    server: str, command: Sequence[str], streams: Sequence[int], folder: Path, variables: Mapping[str, str]
) -> socket.socket:
    """Sends a command line to a server; returns the connection of its answer."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{server}")
    socket.send_fds(connection, [b"."], streams)
    request = {"module": command[2], "arguments": command[3:], "folder": str(folder.resolve())}
    connection.sendall(json.dumps(request | {"environment": dict(variables), "group": 0}).encode())
    connection.shutdown(socket.SHUT_WR)
    return connection


def build(folder: Path, *arguments: str, cores: int = 2, **config: Any) -> Path:
    """Builds an artifact and returns the device's build folder.

    Raises:
        ColdpressError: with the build's sentence, if it refuses or fails.
    """
    running = start(folder, *arguments, cores=cores, more=None, **config)
    if running.wait():
        lines = running.said().strip().splitlines()
        said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
        raise ColdpressError(said.removeprefix("error: "))
    return target(folder, **config)


@functools.cache
def begin() -> "tuple[str, list[subprocess.Popen[bytes]]]":
    """Starts the servers, which end with this process; returns the name of snakemake's server, and both processes.

    A process that was forked from a server starts none: it uses the server's name.
    """
    if SERVERS in os.environ:
        return os.environ[SERVERS], []
    name, folder = f"coldpress-{os.getpid()}", tempfile.TemporaryDirectory()
    client = Path(folder.name) / "python"
    client.write_text(CLIENT.format(python=sys.executable, name=f"{name}-jobs"))
    client.chmod(0o755)
    servers = [_started(f"{name}-jobs"), _started(name, str(client))]
    atexit.register(lambda: (*[server.communicate() for server in servers], folder.cleanup()))
    return name, servers


@functools.cache
def ready() -> str:
    """Waits until the servers have imported everything; returns the name of snakemake's server."""
    name, servers = begin()
    for server in servers:
        assert server.stdout is not None
        if not server.stdout.readline():
            raise RuntimeError("a warm process has ended")
    return name


def _started(*arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm_server", *arguments],
        cwd=ROOT,
        env=environment() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "BENCHMARK_INPUTS": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # in one session, so that jobs can join the group of their build
    )
