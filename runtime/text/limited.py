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
from typing import Any

import coldpress
from coldpress.schemas.errors import ArtifactError, ColdpressError, clipped

WALL_S, MEMORY_BYTES, REPLY_BYTES = 60, 2 << 30, 64 << 20
"""Limits: wall-clock seconds of a short request, on a busy machine too; the process's address space; one reply."""
BYTES_PER_S = 1 << 17
"""Bytes of text per further second: an eighth of the rate of tokenizers in use on a slow processor."""
NO_MEMORY = 75
"""Exit code of a process that needs more memory than it may have."""


class LimitError(Exception):
    """The process exceeded a limit or has ended; the text is the rest of a sentence: `took more than 5 s of …`."""


class LimitedProcess:
    """A process that answers frames one at a time, from any thread; if it has ended, the next frame starts another."""

    process: "subprocess.Popen[bytes]"

    def __init__(self, module: str, cpu_s: int) -> None:
        """Starts `python -m module cpu_s`, which calls `serve`; `begin` says what it is told first."""
        self._module, self._cpu_s, self._first = module, cpu_s, b""
        self._lock = threading.Lock()
        self._finalizer: Callable[[], object] | None = None
        self._start()

    def begin(self, first: bytes) -> None:
        """Sends the first frame, which every further process is sent, too. Raises as `ask`."""
        with self._lock:
            self._first = first
            self._tell()

    def _tell(self) -> None:
        reply = self._answer(self._first)
        if "error" in reply:
            self._stop()  # it still waits for its first frame
            raise ArtifactError(reply["error"])

    def ask(self, frame: bytes) -> Any:
        """Sends a frame, and returns the answer. Raises `LimitError` if the process exceeds a limit or ends,
        `ArtifactError` with the sentence of the process."""
        with self._lock:
            if self._finalizer is None or self.process.poll() is not None:
                self._start()
                self._tell()
            reply = self._answer(frame)
        if "error" in reply:
            raise ArtifactError(reply["error"])
        return reply["value"]

    def _start(self) -> None:
        self._stop()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(self._cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(coldpress.__file__).absolute().parents[1],
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )
        self._finalizer = weakref.finalize(self, _end, self.process)

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer = None

    def _answer(self, frame: bytes) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        wall_s = WALL_S * (1 + len(frame) / (self._cpu_s * BYTES_PER_S))
        try:
            self.process.stdin.write(len(frame).to_bytes(8, "little") + frame)
            self.process.stdin.flush()
            return json.loads(_read_frame(self.process.stdout.fileno(), time.monotonic() + wall_s))
        except (EOFError, BrokenPipeError, TimeoutError) as error:
            if isinstance(error, EOFError) and not error.args:
                self.process.wait()  # it has ended by itself, and its exit code says why
            self._stop()
            code, allowed_s = self.process.returncode, self._cpu_s + len(frame) // BYTES_PER_S
            if code == -signal.SIGXCPU:
                words = f"took more than {allowed_s} s of processor time"
            elif isinstance(error, TimeoutError):
                words = f"took more than {wall_s:.0f} s"
            elif code in (NO_MEMORY, -signal.SIGABRT):  # a library's core aborts where Python raises MemoryError
                words = f"took more than {MEMORY_BYTES >> 30} GiB of memory"
            else:
                words = str(error) or f"has ended (exit code {code})"
            raise LimitError(words) from error


def _read_frame(opened: int, deadline_s: float) -> bytes:
    length = int.from_bytes(_read(opened, 8, deadline_s), "little")
    if length > REPLY_BYTES:
        raise EOFError(f"took more than {REPLY_BYTES >> 20} MiB of output")
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
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while frame := incoming.read(int.from_bytes(incoming.read(8), "little")):
        allowed_s = int(time.process_time()) + cpu_s + len(frame) // BYTES_PER_S
        _limit(resource.RLIMIT_CPU, allowed_s)
        try:
            reply = {"value": answer(frame)}
        except MemoryError:
            os._exit(NO_MEMORY)
        except ColdpressError as error:
            reply = {"error": str(error)}
        except Exception as error:  # one frame fails, not the process that others use, too
            reply = {"error": clipped(f"{type(error).__name__}: {error}")}
        text = json.dumps(reply).encode()
        outgoing.write(len(text).to_bytes(8, "little") + text)
        outgoing.flush()


def _limit(kind: int, wanted: int) -> None:
    """Limits this process, within the hard limit of its caller, which it may not raise."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
