"""Reads requests and writes answers: bodies under their limit, and streams of server-sent events.

A stream says something every few seconds, if only a comment, so that a long prefill does not look like a dead server.
When the client leaves, the sequences end. An error in the middle of a stream is its last event.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coldpress.schemas.errors import ColdpressError
from coldpress.server.refusals import RefusalError, anthropic_error, openai_error
from coldpress.server.run import ClientLeftError, Run
from coldpress.server.sequences import Piece
from coldpress.server.worker import Worker

KEEP_ALIVE = ": the model is working\n\n"
DONE = "data: [DONE]\n\n"


READ_AWAY = 16
"""Times `max_bytes` up to which a longer body is still read, and dropped: a client that finds the connection closed
while it sends may never look for the answer."""


async def body_of(request: Request, max_bytes: int) -> bytes:
    """Reads a body of JSON.

    Raises:
        RefusalError: 415 for another type, 413 for a larger body; the bytes beyond `max_bytes` are read and dropped.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusalError(415, f"the body's content-type is '{kind}', expected 'application/json'; set the header")
    too_large = RefusalError(413, f"the body has more than {max_bytes} bytes, the most that is taken; shorten it")
    said = request.headers.get("content-length", "0")
    if said.isdecimal() and int(said) > READ_AWAY * max_bytes:
        raise too_large
    found, length = bytearray(), 0
    try:
        async for piece in request.stream():
            length += len(piece)
            if length <= max_bytes:
                found += piece
            elif length > READ_AWAY * max_bytes:
                break
    except ClientDisconnect as error:
        raise ClientLeftError from error
    if length > max_bytes:
        raise too_large
    return bytes(found)


def event(data: object, name: str | None = None) -> str:
    """Returns a server-sent event with JSON."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def openai_event(status: int, text: str) -> str:
    """Returns the event of an error, as clients of OpenAI's interfaces read it."""
    return event(openai_error(status, text))


def anthropic_event(status: int, text: str) -> str:
    """Returns the event of an error, as clients of Anthropic's interface read it."""
    return event(anthropic_error(status, text), "error")


Events = Callable[[AsyncIterator[tuple[int, Piece] | None]], AsyncIterator[str]]
"""Turns the pieces of a run into events; None among the pieces asks for a comment."""


class EventStream(Response):
    """Streams the events of a run."""

    media_type = "text/event-stream"

    def __init__(
        self, run: Run, worker: Worker, keep_alive_s: float, events: Events, failed: Callable[[int, str], str]
    ) -> None:
        """`failed` makes the event of an error, from its status and its sentence."""
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._run, self._worker, self._keep_alive_s = run, worker, keep_alive_s
        self._events, self._failed = events, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pieces: Any = self._run.follow(self._worker, receive, self._keep_alive_s)
        async with aclosing(pieces):
            try:
                async for text in self._events(pieces):
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            except (ClientLeftError, OSError):  # the socket may be the first to say so
                return
            except ColdpressError as error:
                text = self._failed(500, str(error))
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
