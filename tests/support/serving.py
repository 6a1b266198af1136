"""Runs `coldpress serve` in a process of its own, and talks to it over plain HTTP."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from coldpress.server.command import StoppingServer, listen, open_served, uvicorn_config
from coldpress.server.served import Served
from coldpress.server.settings import Settings
from tests.support.data import ROOT

WAIT_S = 120
"""How long an event may take on a busy machine before a test gives up."""


@dataclass(frozen=True)
class Answer:
    """An answer of the server."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        """Returns the body's JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Returns the data of a stream's events, without the closing mark."""
        lines = self.body.decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: "subprocess.Popen[str] | None"
    """None if it runs in this process."""
    host: str
    port: int
    name: str
    served: Served | None = None
    """What it serves, if it runs in this process."""
    uvicorn: "uvicorn.Server | None" = None

    @property
    def url(self) -> str:
        """Returns the server's address."""
        return f"http://{self.host}:{self.port}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps a server in this process from computing any token."""
        assert self.served
        with self.served.worker._session.step:
            yield

    @contextmanager
    def streamed(self, **fields: Any) -> Iterator[http.client.HTTPResponse]:
        """Yields a stream of /v1/completions before anything of it is read."""
        connection = self.connection()
        try:
            body = json.dumps({"model": self.name, "stream": True, **fields})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()

    def connection(self) -> http.client.HTTPConnection:
        """Opens a connection."""
        return http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Sends a request, and returns its answer."""
        connection = self.connection()
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json", **headers})
            found = connection.getresponse()
            return Answer(found.status, found.read(), {name.lower(): value for name, value in found.getheaders()})
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> Answer:
        """Sends fields as JSON, with the model's name unless they have one."""
        named = {} if path in ("/tokenize", "/admin/dram") else {"model": self.name}
        return self.send("POST", path, named | fields)

    def metrics(self) -> dict[str, float]:
        """Returns the server's numbers by name."""
        text = self.send("GET", "/metrics").body.decode()
        return {name: float(value) for name, value in re.findall(r"^coldpress_(\w+) (\S+)$", text, re.MULTILINE)}

    def wait_for(self, holds: Any) -> dict[str, float]:
        """Waits until `holds` is true of the numbers, and returns them."""
        deadline_s = time.monotonic() + WAIT_S
        while not holds(found := self.metrics()):
            assert time.monotonic() < deadline_s, found
            time.sleep(0.01)
        return found


@contextmanager
def serving(path: Path, *flags: object, name: str = "tiny") -> Iterator[Server]:
    """Runs a server of an artifact, which listens when this returns; it must end with code 0 on SIGTERM."""
    command = [sys.executable, "-m", "coldpress", "serve", path, "--port", 0, "--name", name, *flags]
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()
            found = re.search(r" at http://([\d.]+):(\d+) with ", line)
            assert found, f"no address in {line!r}"
            yield Server(process, found[1], int(found[2]), name)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


@contextmanager
def serving_here(path: Path, **settings: Any) -> Iterator[Server]:
    """Runs a server of an artifact in threads of this process."""
    served = open_served(Settings(artifact=str(path), port=0, **{"name": "tiny", **settings}))
    listening = listen("127.0.0.1", 0)
    server = StoppingServer(uvicorn_config(served), served.worker)
    served.worker.start()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield Server(None, "127.0.0.1", listening.getsockname()[1], served.name, served, server)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        served.worker.stop()
        listening.close()
