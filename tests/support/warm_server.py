"""Runs modules in processes forked from this one, which has imported what they need: `warm_server.py NAME [CLIENT]`.

A tiny build would spend nearly all of its time on importing torch and snakemake in every job. Without CLIENT, this
server runs jobs. With CLIENT, it runs snakemake, which starts its jobs with the script CLIENT as Python: the script
sends the command line to the server of the jobs (tests/support/warm.py starts both).

A request comes over the abstract socket NAME: the three standard streams, then a JSON object with `module`,
`arguments`, `folder`, `environment` and `group` (the process group to join, 0 for a new one). The answer is the
process's id and group, then its exit code.

When its standard input ends, the server kills the processes that it has started, and ends.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress

from coldpress.compiler.job import parameters_of
from coldpress.compiler.pipeline import STAGES
from tests.support import warm_inputs
from tests.support.snakemake_server import import_workflow, run_and_end

HEAVY = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "scipy.optimize",
    "scipy.sparse.csgraph",
    "jinja2",
    "matplotlib.figure",
    "mpl_toolkits.mplot3d",
    "pulp",
    "highspy",
    "coldpress.cli.main",
    "coldpress.runtime.cli.commands",
)


def main(name: str, client: str = "") -> None:
    """Answers requests until standard input ends."""
    if client:
        import_workflow()
    else:
        for module in HEAVY:
            importlib.import_module(module)
        for stage in STAGES:
            parameters_of(stage)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{name}")
    listening.listen()
    print("ready", flush=True)
    started: list[int] = []
    while sys.stdin not in (ready := select.select([sys.stdin, listening], [], [])[0]):
        assert listening in ready
        connection = listening.accept()[0]
        pid = os.fork()
        if pid == 0:
            listening.close()
            _answer(connection, client)
        connection.close()
        started = [one for one in started if os.waitpid(one, os.WNOHANG) == (0, 0)] + [pid]
    for pid in started:
        with suppress(ProcessLookupError):
            os.killpg(os.getpgid(pid), signal.SIGKILL)


def _answer(connection: socket.socket, client: str) -> None:
    """Runs a request in a child and reports its id and exit code; does not return."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().read())
    with suppress(PermissionError, ProcessLookupError):  # the group was killed meanwhile
        os.setpgid(0, request["group"])
        child = os.fork()
        if child == 0:
            connection.close()
            _run(request, streams, client)
        for stream in (0, *streams):
            os.close(stream)
        connection.sendall(f"{child} {os.getpgrp()}\n".encode())
        connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
    os._exit(0)


def _run(request: dict, streams: list[int], client: str) -> None:
    """Becomes the requested process, and ends with it."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv = [request["module"], *request["arguments"]]
    sys.orig_argv[:] = [sys.executable, "-m", *sys.argv]
    if client:
        sys.executable = client
    else:
        runpy.run_path(os.path.join(os.path.dirname(__file__), "usage_hook", "sitecustomize.py"))
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    warm_inputs.begin(request["module"], request["arguments"])
    run_and_end(request["module"])


if __name__ == "__main__":
    main(*sys.argv[1:])
