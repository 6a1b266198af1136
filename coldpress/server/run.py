"""Follows the sequences of one request until they have ended or the client has left."""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Several
from contextlib import aclosing, suppress

from starlette.types import Receive

from coldpress.server.refusals import RefusalError
from coldpress.server.sequences import Piece, Sequence
from coldpress.server.worker import Worker


class ClientLeftError(Exception):
    """The client has closed its connection; there is nobody to tell."""


class RequestRun:
    """The sequences of a request, in the order of the answer's choices, and the queue in which their pieces arrive."""

    def __init__(self, sequences: list[Sequence], pieces: "asyncio.Queue[tuple[int, Piece]]") -> None:
        self.sequences, self._pieces = sequences, pieces

    async def follow(
        self, worker: Worker, receive: Receive, keep_alive_s: float | None = None
    ) -> AsyncGenerator[tuple[int, Piece] | None]:
        """Yields (number of the sequence, piece) as pieces come, until all sequences have ended.

        Whatever ends the iteration, no sequence of the request runs on for long.

        Args:
            worker: Runs the sequences, which have been submitted.
            receive: The request's, whose body has been read.
            keep_alive_s: After so many seconds without a piece, None is yielded.

        Raises:
            ClientLeftError: as soon as the client has left.
            RefusalError: 500 if a sequence fails.
        """
        left = asyncio.ensure_future(_left(receive))
        coming = asyncio.ensure_future(self._pieces.get())
        num_open = len(self.sequences)
        try:
            while num_open:
                await asyncio.wait({left, coming}, timeout=keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    number, piece = coming.result()
                    if piece.error:  # not the client's fault, such as a damaged page of the artifact
                        raise RefusalError(500, str(piece.error)) from piece.error
                    num_open -= piece.finish is not None
                    if num_open:
                        coming = asyncio.ensure_future(self._pieces.get())
                    yield number, piece
                elif left.done():
                    raise ClientLeftError
                else:
                    yield None
        finally:
            worker.cancel([sequence for sequence in self.sequences if not sequence.ended])
            for task in (left, coming):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def all(self, worker: Worker, receive: Receive) -> list[list[Piece]]:
        """Returns all pieces of each sequence. Raises as `follow`."""
        found: list[list[Piece]] = [[] for _ in self.sequences]
        async with aclosing(self.follow(worker, receive)) as pieces:
            async for each in pieces:
                if each is not None:
                    found[each[0]].append(each[1])
        return found


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def joined(pieces: Several[Piece]) -> str:
    return "".join(piece.text for piece in pieces)
