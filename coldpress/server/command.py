"""Starts the server: loads the artifact, opens the port, and stops when it is told to.

SIGTERM and SIGINT end it in order: it refuses new requests, finishes those that it has accepted, and closes the
artifact. A second SIGINT ends it at once.
"""

import logging
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from coldpress.runtime.cli.declaration import PLACE, argument, command, option
from coldpress.runtime.generate.choice import budget_at
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.quantities import parse_bytes, show_bytes
from coldpress.runtime.text.chat import ChatTemplate
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError
from coldpress.server.app import make_app
from coldpress.server.served import Served
from coldpress.server.settings import Settings
from coldpress.server.worker import Worker

KEY_VARIABLE = "COLDPRESS_KEY"
EXAMPLES = """
  coldpress serve mistral-7b-oneplus12.coldpress --dram 3GB --name mistral
"""
BACKLOG = 128
"""Connections that the system accepts before the server does."""


def serve(
    artifact: str,
    host: str = "127.0.0.1",
    port: int = 8080,
    dram: str | int | None = None,
    key: str | None = None,
    *,
    name: str | None = None,
    max_queue: int = 64,
    max_batch: int = FEW_TOKENS,
    batch_tokens: int | None = None,
    max_tokens: int = 512,
    max_body_bytes: int = 4 << 20,
    keep_alive_s: float = 10.0,
    prefixes: str | None = None,
    prefix_bytes: str | int = 1 << 30,
) -> None:
    """Serves an artifact until SIGTERM or SIGINT.

    Args:
        artifact: The artifact's folder.
        host: Where to listen; other machines reach it only if it is not the loopback address.
        port: 0 takes any free one; the address is printed.
        dram: The DRAM budget, as text such as "3GB" or "50%" or in bytes; None for the artifact's largest plan.
        key: What clients must send; None asks for nothing.
        name, max_queue, max_batch, batch_tokens, max_tokens, max_body_bytes, keep_alive_s, prefixes: See `Settings`.
        prefix_bytes: Most bytes of the folder `prefixes`, also as text.

    Raises:
        ColdpressError: if the artifact cannot be loaded, a setting is outside its limits, or the port is taken.
    """
    settings = Settings(
        artifact=str(artifact),
        host=host,
        port=port,
        dram_budget_bytes=budget_at(artifact, dram),
        key=key,
        name=name,
        max_queue=max_queue,
        max_batch=max_batch,
        batch_tokens=batch_tokens,
        max_tokens=max_tokens,
        max_body_bytes=max_body_bytes,
        keep_alive_s=keep_alive_s,
        prefixes=prefixes,
        prefix_bytes=parse_bytes(prefix_bytes),
    )
    served = open_served(settings)
    listening = listen(host, port)
    config = uvicorn_config(served)
    served.worker.start()
    with listening:
        address = listening.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        budget = show_bytes(served.worker.memory()[0])
        print(f"serving {served.name} at http://{shown}:{address[1]} with {budget} of DRAM", flush=True)
        try:
            StoppingServer(config, served.worker).run(sockets=[listening])
        finally:
            served.worker.stop()


def open_served(settings: Settings) -> Served:
    """Loads the artifact; the worker's thread is not started yet."""
    session = Session(settings.artifact, dram_budget_bytes=settings.dram_budget_bytes)
    manifest = session.artifact.manifest
    most = max(settings.batch_tokens or 0, session.plan.context_length)
    if not session.has_kv_room(most):
        raise ColdpressError(
            f"batch_tokens is {most}, but the DRAM budget of {session.plan.dram_budget_bytes} bytes has no room for "
            "their keys and values; give fewer, or a larger budget"
        )
    return Served(
        name=settings.name or Path(settings.artifact).resolve().name.removesuffix(".coldpress"),
        created_s=int(time.time()),
        settings=settings,
        worker=Worker(session, settings),
        codec=TextCodec.of(session.artifact),
        template=ChatTemplate.of(session.artifact),
        eos_ids=frozenset(manifest.model.eos_token_ids),
        vocab_size=manifest.model.vocab_size,
    )


def uvicorn_config(served: Served) -> uvicorn.Config:
    """Returns how uvicorn runs the application; what goes wrong in a request, the application itself logs."""
    return uvicorn.Config(
        make_app(served), log_level="critical", access_log=False, server_header=False, lifespan="off", ws="none"
    )


class StoppingServer(uvicorn.Server):
    """Refuses new requests as soon as it is told to stop, and hands no signal on."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._worker.refuse_more()
        super().handle_exit(sig, frame)
        self._captured_signals.clear()  # it would raise the signal again when all is done, and end with its code


def listen(host: str, port: int) -> socket.socket:
    """Opens the port. Raises `ColdpressError` if it is taken, or the host is not this machine's."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as on_failure:
            opened = on_failure.enter_context(socket.socket(family, kind))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen(BACKLOG)
            on_failure.pop_all()
            return opened
    except OSError as error:
        raise ColdpressError(
            f"cannot listen on {host}, port {port} ({error.strerror}); give another port or host"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Serve:
    """The flags of `coldpress serve`; None is the default of `serve`."""

    artifact: str = argument("the artifact's folder", type=PLACE)
    host: str | None = option("where to listen (default: 127.0.0.1, which only this machine reaches)", metavar="HOST")
    port: int | None = option("default: 8080; 0 takes any free one", type=int, metavar="PORT")
    dram: str | None = option("budget, such as 3GB or 50% (default: the artifact's largest plan)", metavar="BYTES")
    key: str | None = option(
        f"what clients must send as a bearer token or x-api-key (default: ${KEY_VARIABLE}, which no list of processes "
        "shows; else nothing is asked for)",
        envvar=KEY_VARIABLE,
        metavar="KEY",
    )
    name: str | None = option("the model's name in requests (default: the artifact's)", metavar="NAME")
    max_queue: int | None = option("sequences that may wait (default: 64)", type=int, metavar="N")
    max_batch: int | None = option(f"most that run at once (default: {FEW_TOKENS})", type=int, metavar="N")
    batch_tokens: int | None = option(
        "tokens of all running sequences (default: the plan's context)", type=int, metavar="N"
    )
    max_tokens: int | None = option(
        "new tokens where a request does not say how many (default: 512)", type=int, metavar="N"
    )
    max_body_bytes: int | None = option("longest body of a request (default: 4 MiB)", type=int, metavar="N")
    keep_alive_s: float | None = option(
        "seconds after which a silent stream says so (default: 10)", type=float, metavar="S"
    )
    prefixes: str | None = option(
        "keep prompts' keys and values there (default: nowhere)", type=PLACE, metavar="FOLDER"
    )
    prefix_bytes: str | None = option("most bytes of that folder (default: 1 GiB)", metavar="BYTES")


def run(flags: Serve) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    serve(**{name: value for name, value in vars(flags).items() if value is not None})


COMMAND = command(Serve, run, name="serve", help=__doc__, examples=EXAMPLES)
