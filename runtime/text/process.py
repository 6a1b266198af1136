"""Runs the tokenizer in a separate process with limits (runtime/text/limited.py).

A tokenizer is a small program that a stranger wrote: patterns, replacements, templates. Its time and memory may grow
without bound, and a mistake in it may end a process.

The first frame is tokenizer.json itself, all others are the name of a member of `Engine` and its arguments.
"""

import itertools
import json
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from coldpress.runtime.text.limited import LimitedProcess, LimitError, serve
from coldpress.schemas.errors import ArtifactError, clipped

TOKENIZER_FILE = "tokenizer/tokenizer.json"


class Engine:
    """A tokenizer of the `tokenizers` package, whose failures are sentences; sets no limits."""

    def __init__(self, data: bytes) -> None:
        """Raises `ArtifactError` if the bytes are not a tokenizer."""
        with _telling("not a tokenizer"):
            self._tokenizer = Tokenizer.from_buffer(data)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # by id: the library compares texts, and misses special tokens whose text its normalizer has changed
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(token_id for token_id, token in added if token.special)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns the token ids of a text; with `special`, the post-processor adds its special tokens."""
        with _telling("failing on this text"):
            return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        with _telling("failing on these ids"):
            return self._tokenizer.decode([token_id for token_id in ids if token_id not in self._special])

    def token(self, token_id: int) -> str:
        """Returns a token as the vocabulary writes it; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def stream(self) -> Callable[[Sequence[int]], str]:
        """Returns a function that takes further ids and returns the text that has become certain."""
        stream = DecodeStream()

        def step(ids: Sequence[int]) -> str:
            with _telling("failing on these ids"):
                pieces = [stream.step(self._tokenizer, token_id) for token_id in ids if token_id not in self._special]
            return "".join(piece or "" for piece in pieces)

        return step


@contextmanager
def _telling(found: str) -> Generator[None]:
    try:
        yield
    except BaseException as error:  # the package raises plain Exception; a panic of its core is only a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ArtifactError(f"{TOKENIZER_FILE}: {found} ({clipped(str(error))}); rebuild the artifact") from error


class LimitedEngine:
    """An `Engine` in a limited process, with the same members; threads may share it."""

    cpu_s = 5
    """Processor seconds for a short request; building the largest tokenizers in use takes one second."""

    def __init__(self) -> None:
        """Starts the process, which imports its libraries while its caller does other things."""
        self._numbers = itertools.count()
        self._ended = deque[int]()
        """Streams that nobody holds any more: the next message says so."""
        self._limited = LimitedProcess("coldpress.runtime.text.process", self.cpu_s)

    def load(self, data: bytes) -> None:
        """Builds the tokenizer from the bytes of tokenizer.json, before anything else. Raises `ArtifactError` if they
        are not a tokenizer, or it exceeds the limits."""
        with _sentence():
            self._limited.begin(data)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._ask("encode", text, special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._ask("decode", list(ids))

    def token(self, token_id: int) -> str:
        return self._ask("token", token_id)

    def stream(self) -> Callable[[Sequence[int]], str]:
        number, given = next(self._numbers), list[int]()

        def step(ids: Sequence[int]) -> str:
            piece = self._ask("step", number, list(ids), None if given else [])
            if piece is None:  # the process is a new one, which has seen none of this stream
                piece = self._ask("step", number, list(ids), given)
            given.extend(ids)
            return piece

        weakref.finalize(step, self._ended.append, number)
        return step

    def _ask(self, name: str, *arguments: Any) -> Any:
        ended = list[int]()
        with suppress(IndexError):  # emptied by now, perhaps by another thread
            while True:
                ended.append(self._ended.popleft())
        with _sentence():
            return self._limited.ask(json.dumps([ended, name, *arguments]).encode())


@contextmanager
def _sentence() -> Generator[None]:
    try:
        yield
    except LimitError as error:
        raise ArtifactError(
            f"{TOKENIZER_FILE}: the tokenizer {error}; give token ids and --json, or rebuild the artifact with another "
            "tokenizer"
        ) from error


class _TokenizerAnswers:
    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._streams: dict[int, Callable[[Sequence[int]], str]] = {}

    def answer(self, frame: bytes) -> Any:
        if self._engine is None:
            self._engine = Engine(frame)
            return None
        ended, name, *arguments = json.loads(frame)
        for number in ended:
            self._streams.pop(number, None)
        if name == "step":
            return self._step(self._engine, *arguments)
        members = {"encode": self._engine.encode, "decode": self._engine.decode, "token": self._engine.token}
        return members[name](*arguments)

    def _step(self, engine: Engine, number: int, ids: Sequence[int], before: Sequence[int] | None) -> str | None:
        """Returns the text of a stream's further ids; None if it is unknown and its first ids are not given."""
        if number not in self._streams:
            if before is None:
                return None
            self._streams[number] = engine.stream()
            self._streams[number](before)
        return self._streams[number](ids)


if __name__ == "__main__":
    serve(_TokenizerAnswers().answer)
