"""Runs a tokenizer whose cost is not bounded in a separate process, with limits on time, memory and output.

Frames of both directions are 8 bytes of length, then JSON; the first frame is tokenizer.json itself. The time limit
grows with the length of a frame, so that only a long text may take long. The process ends when its caller ends, because
it then reads the end of its input.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import coldpress
from coldpress.runtime.text.engine import TOKENIZER_FILE, Engine
from coldpress.schemas.errors import ArtifactError, ColdpressError

WALL_S, MEMORY_BYTES, REPLY_BYTES = 60, 2 << 30, 64 << 20
"""Limits: wall-clock seconds of a short request, on a busy machine too; the process's address space; one reply."""
BYTES_PER_S = 1 << 17
"""Bytes of text per further second: an eighth of the rate of tokenizers in use on a slow processor."""


class LimitedEngine:
    """An `Engine` in a limited process, with the same members."""

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
        self._reason = reason
        self._process = subprocess.Popen(
            [sys.executable, "-m", "coldpress.runtime.text.process", str(self.cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(coldpress.__file__).absolute().parents[1],
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
        )
        weakref.finalize(self, _end, self._process)
        self.special = frozenset(self._answer(data))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """See `Engine`."""
        return self._ask("encode", text, special)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Engine`."""
        return self._ask("decode", list(ids))

    def stream(self) -> Callable[[Sequence[int]], str]:
        """See `Engine`; a second stream ends the first."""
        self._ask("stream")
        return lambda ids: self._ask("step", list(ids))

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._answer(json.dumps([name, *arguments]).encode())

    def _answer(self, frame: bytes) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(len(frame).to_bytes(8, "little") + frame)
            self._process.stdin.flush()
            deadline_s = time.monotonic() + WALL_S * (1 + len(frame) / (self.cpu_s * BYTES_PER_S))
            reply = json.loads(self._read_frame(self._process.stdout.fileno(), deadline_s))
        except (EOFError, BrokenPipeError, TimeoutError) as error:
            self._process.kill()
            self._process.wait()
            allowed_s = self.cpu_s + len(frame) // BYTES_PER_S
            limits = f"{allowed_s} s of processor time, {MEMORY_BYTES >> 30} GiB of memory or {REPLY_BYTES >> 20} MiB"
            raise ArtifactError(
                f"{TOKENIZER_FILE}: the tokenizer took more than {limits} of output, which is limited since it has "
                f"{self._reason}; give token ids and --json, or rebuild the artifact with another tokenizer"
            ) from error
        if "error" in reply:
            raise ArtifactError(reply["error"])
        return reply["value"]

    def _read_frame(self, opened: int, deadline_s: float) -> bytes:
        length = int.from_bytes(_read(opened, 8, deadline_s), "little")
        if length > REPLY_BYTES:
            raise EOFError
        return _read(opened, length, deadline_s)


def _read(opened: int, count: int, deadline_s: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        if not select.select([opened], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            raise TimeoutError
        piece = os.read(opened, count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _end(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    process.kill()
    process.wait()


# The other side


def _serve(incoming: IO[bytes], outgoing: IO[bytes], cpu_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    engine: Engine | None = None
    step: Callable[[Sequence[int]], str] | None = None
    while frame := _next_frame(incoming):
        used_s = int(time.process_time())
        allowed_s = cpu_s + len(frame) // BYTES_PER_S
        resource.setrlimit(resource.RLIMIT_CPU, (used_s + allowed_s, resource.RLIM_INFINITY))
        try:
            if engine is None:
                engine = Engine(frame)
                value: Any = sorted(engine.special)
            else:
                name, *arguments = json.loads(frame)
                if name == "stream":
                    step, value = engine.stream(), None
                elif name == "step" and step:
                    value = step(*arguments)
                else:
                    value = {"encode": engine.encode, "decode": engine.decode}[name](*arguments)
            reply = {"value": value}
        except ColdpressError as error:
            reply = {"error": str(error)}
        text = json.dumps(reply).encode()
        outgoing.write(len(text).to_bytes(8, "little") + text)
        outgoing.flush()


def _next_frame(incoming: IO[bytes]) -> bytes:
    return incoming.read(int.from_bytes(incoming.read(8), "little"))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal interrupts the caller too, and the caller ends us
    _serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))
