"""Runs a stranger's program, such as a tokenizer or a chat template, in a separate process with limits.

Limited are time, memory and output. Frames of both directions are 8 bytes of length, then JSON; the first frame may be
anything. The time limit grows with the length of a frame, so that only a long text may take long. The process ends when
its caller ends, because it then reads the end of its input.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import coldpress
from coldpress.schemas.errors import ArtifactError, ColdpressError

WALL_S, MEMORY_BYTES, REPLY_BYTES = 60, 2 << 30, 64 << 20
"""Limits: wall-clock seconds of a short request, on a busy machine too; the process's address space; one reply."""
BYTES_PER_S = 1 << 17
"""Bytes of text per further second: an eighth of the rate of tokenizers in use on a slow processor."""


class LimitError(Exception):
    """The process exceeded a limit, and has been ended; the text names the limits."""


class LimitedProcess:
    """A process that answers frames one at a time, from any thread."""

    def __init__(self, module: str, cpu_s: int) -> None:
        """Starts `python -m module cpu_s`, which calls `serve`."""
        self._cpu_s, self._lock = cpu_s, threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(coldpress.__file__).absolute().parents[1],
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )
        weakref.finalize(self, _end, self.process)

    def ask(self, frame: bytes) -> Any:
        """Sends a frame, and returns the answer.

        Raises:
            LimitError: if the process exceeds a limit or has ended.
            ArtifactError: with the sentence of the process.
        """
        with self._lock:
            assert self.process.stdin
            assert self.process.stdout
            try:
                self.process.stdin.write(len(frame).to_bytes(8, "little") + frame)
                self.process.stdin.flush()
                deadline_s = time.monotonic() + WALL_S * (1 + len(frame) / (self._cpu_s * BYTES_PER_S))
                reply = json.loads(_read_frame(self.process.stdout.fileno(), deadline_s))
            except (EOFError, BrokenPipeError, TimeoutError) as error:
                self.process.kill()
                self.process.wait()
                allowed_s = self._cpu_s + len(frame) // BYTES_PER_S
                raise LimitError(
                    f"{allowed_s} s of processor time, {MEMORY_BYTES >> 30} GiB of memory or {REPLY_BYTES >> 20} MiB "
                    "of output"
                ) from error
        if "error" in reply:
            raise ArtifactError(reply["error"])
        return reply["value"]


def _read_frame(opened: int, deadline_s: float) -> bytes:
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


def serve(answer: Callable[[bytes], Any]) -> None:
    """Answers frames with what `answer` returns for them, until the input ends; the process's argument is cpu_s."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal interrupts the caller too, and the caller ends us
    cpu_s, incoming, outgoing = int(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while frame := _next_frame(incoming):
        allowed_s = int(time.process_time()) + cpu_s + len(frame) // BYTES_PER_S
        resource.setrlimit(resource.RLIMIT_CPU, (allowed_s, resource.RLIM_INFINITY))
        try:
            reply = {"value": answer(frame)}
        except ColdpressError as error:
            reply = {"error": str(error)}
        text = json.dumps(reply).encode()
        outgoing.write(len(text).to_bytes(8, "little") + text)
        outgoing.flush()


def _next_frame(incoming: IO[bytes]) -> bytes:
    return incoming.read(int.from_bytes(incoming.read(8), "little"))
