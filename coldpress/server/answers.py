"""Reads requests and writes answers: bodies under their limit, and streams of server-sent events.

A stream says something every few seconds, if only a comment, so that a long prefill does not look like a dead server.
When the client leaves, the sequences end. An error in the middle of a stream is its last event.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from coldpress.schemas.errors import ColdpressError
from coldpress.server.fields import Asked, Fields, read
from coldpress.server.refusals import RefusalError, openai_error
from coldpress.server.run import ClientLeftError, RequestRun
from coldpress.server.sequences import Piece
from coldpress.server.served import Served

KEEP_ALIVE = ": the model is working\n\n"
READ_AWAY = 16
"""Times the limit up to which a longer body is still read, and dropped: a client that finds the connection closed while
it sends may never look for the answer."""


async def body_of(kind: type[Fields], request: Request, served: Served) -> Fields:
    """Reads a body of JSON, for the model that is served if it names one. Raises `RefusalError`: 415 for another type,
    413 for a larger body, whose bytes beyond the limit are read and dropped; as `read`."""
    max_bytes = served.settings.max_body_bytes
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != "application/json":
        raise RefusalError(415, f"the body's content-type is '{content}', expected 'application/json'; set the header")
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
    asked = read(kind, bytes(found))
    if isinstance(asked, Asked):
        served.check_name(asked.model)
    return asked


def event(data: object, name: str | None = None) -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class Answer(ABC):
    """The shapes of one answer, whole and streamed."""

    def __init__(self, served: Served) -> None:
        self.served = served

    async def send(self, run: RequestRun, request: Request, *, is_streamed: bool | None) -> Response:
        if is_streamed:
            return _EventStream(self, run)
        return JSONResponse(self.whole(await run.all(self.served.worker, request.receive)))

    @abstractmethod
    def whole(self, found: list[list[Piece]]) -> dict[str, Any]:
        """Returns the answer of ended sequences."""

    def begun(self) -> Iterator[str]:
        """Yields the events before all pieces."""
        yield from ()

    @abstractmethod
    def events(self, number: int, piece: Piece) -> Iterator[str]:
        """Yields the events of a piece of the sequence `number`."""

    @abstractmethod
    def ended(self) -> Iterator[str]:
        """Yields the events behind all pieces."""

    def failed(self, text: str) -> str:
        return event(openai_error(500, text))


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, answer: Answer, run: RequestRun) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._answer, self._run = answer, run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, served = self._answer, self._answer.served

        async def send_all(texts: Iterable[str]) -> None:
            for text in texts:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pieces = self._run.follow(served.worker, receive, served.settings.keep_alive_s)
        async with aclosing(pieces):
            try:
                await send_all(answer.begun())
                async for each in pieces:
                    await send_all((KEEP_ALIVE,) if each is None else answer.events(*each))
                await send_all(answer.ended())
            except (ClientLeftError, OSError):  # the socket may be the first to say so
                return
            except ColdpressError as error:
                await send_all((answer.failed(str(error)),))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
