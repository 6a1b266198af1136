"""Runs a tokenizer whose cost is not bounded in a separate process with limits (runtime/text/limited.py).

The first frame is tokenizer.json itself, all others are the name of a member of `Engine` and its arguments.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from coldpress.runtime.text.engine import TOKENIZER_FILE, Engine
from coldpress.runtime.text.limited import LimitedProcess, LimitError, serve
from coldpress.schemas.errors import ArtifactError

MAX_STREAMS = 64
"""Streams that may go on at once; the next one ends the oldest. Twice as many as sequences that run at once."""


class LimitedEngine:
    """An `Engine` in a limited process, with the same members; threads may share it."""

    cpu_s = 5
    """Processor seconds for a short request; building the largest tokenizers in use takes one second."""

    def __init__(self, data: bytes, reason: str) -> None:
        """Starts the process.

        Args:
            data: tokenizer.json.
            reason: The part of the tokenizer whose cost has no known bound, for errors.

        Raises:
            ArtifactError: if the data is not a tokenizer, or exceeds the limits.
        """
        self._reason, self._numbers = reason, itertools.count()
        self._limited = LimitedProcess("coldpress.runtime.text.process", self.cpu_s)
        self._process = self._limited.process
        self.special = frozenset(self._answer(data))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """See `Engine`."""
        return self._ask("encode", text, special)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Engine`."""
        return self._ask("decode", list(ids))

    def stream(self) -> Callable[[Sequence[int]], str]:
        """See `Engine`; at most MAX_STREAMS go on at once."""
        number = next(self._numbers)
        self._ask("stream", number)
        return lambda ids: self._ask("step", number, list(ids))

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._answer(json.dumps([name, *arguments]).encode())

    def _answer(self, frame: bytes) -> Any:
        try:
            return self._limited.ask(frame)
        except LimitError as error:
            raise ArtifactError(
                f"{TOKENIZER_FILE}: the tokenizer took more than {error}, which is limited since it has "
                f"{self._reason}; give token ids and --json, or rebuild the artifact with another tokenizer"
            ) from error


class _Answers:
    """The other side: the tokenizer and its streams."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._streams: dict[int, Callable[[Sequence[int]], str]] = {}

    def answer(self, frame: bytes) -> Any:
        if self._engine is None:
            self._engine = Engine(frame)
            return sorted(self._engine.special)
        name, *arguments = json.loads(frame)
        if name == "stream":
            self._streams[arguments[0]] = self._engine.stream()
            if len(self._streams) > MAX_STREAMS:
                del self._streams[min(self._streams)]
            return None
        if name == "step":
            return self._streams[arguments[0]](arguments[1])
        return {"encode": self._engine.encode, "decode": self._engine.decode}[name](*arguments)


if __name__ == "__main__":
    serve(_Answers().answer)
