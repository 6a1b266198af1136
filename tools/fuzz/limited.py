"""Runs a command in a forked process with limits of time and memory, and classifies how it ends.

A fork does not import anything again. A program may answer bad input with one sentence and nothing else. Every other
end has a class here, so that a campaign can count it: a traceback, death by a signal, endless work, memory without
bounds, or output that is not one plain line.
"""

import contextlib
import faulthandler
import os
import re
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CLASSES = ("fine", "refused", "untidy", "traceback", "crash", "hang", "over_2_gb")
BAD = CLASSES[2:]
"""Classes that no input may lead to."""
MEMORY_BYTES = 2_000_000_000
"""Memory that a command may use beyond that of the process when it was forked."""
ADDRESS_BYTES = 2_500_000_000
"""Address space that a command may request beyond that of the process: if it is refused more, its sentence must say so.
It is larger than MEMORY_BYTES, so that a command that uses too much memory is noticed."""
CPU_S = 30
"""Limit of processor time, since on a busy machine wall time says little: the artifacts here take a command less than
0.3 s. The first preflight of a campaign takes 12 s, since it imports the modules of all stages."""
WALL_S = 600.0
MAX_SENTENCE_CHARS = 1000
MAX_OUTPUT_BYTES = 4 << 20
MAX_FILE_BYTES = 256 << 20
OUT_OF_MEMORY = re.compile(r"MemoryError|bad_alloc|memory allocation of|Unable to allocate|Cannot allocate memory")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that move a cursor, start an escape sequence or change the direction of writing."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    kind: str
    """One of CLASSES."""
    words: str
    """The last lines of its stderr, and the signal or time limit that ended it."""
    output: str
    """Its stdout."""

    @property
    def signature(self) -> tuple[str, str]:
        """Equal for failures that are probably one defect: figures and quoted texts are masked."""
        last = (self.words.strip().splitlines() or [""])[-1]
        return self.kind, re.sub(r"'[^']*'|\d+", "*", last)[:120]


def run_limited(function: Callable[[], int | None], scratch: Path, logs: bool = False) -> Ended:
    """Runs `function` in a forked process and returns how it ended.

    Args:
        function: The command; it returns the exit code, None for 0.
        scratch: A folder for its stdout and stderr.
        logs: Whether notices may come before the sentence on stderr, as in the compiler.
    """
    out, err, begun = scratch / "stdout", scratch / "stderr", scratch / "resident"
    begun.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _be_child(function, out, err, begun)  # never returns
    status, usage = _wait(child)
    output, words = _read(out), _read(err)
    # relative to the child's start: a fork does not inherit resident pages of files that its parent has mapped
    grown_bytes = 1024 * usage.ru_maxrss - int(_read(begun) or 0)
    return Ended(classify(status, words, output, grown_bytes, logs), _ending(status, words), output)


def classify(status: int | None, words: str, output: str, grown_bytes: int, logs: bool = False) -> str:
    """Returns the class of an end.

    Args:
        status: As os.wait returns it; None if the process reached the limit of wall time.
        words: All of stderr.
        output: All of stdout.
        grown_bytes: Largest growth of the process's memory since its start.
        logs: As in `run_limited`.
    """
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "hang"
    code = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if grown_bytes > MEMORY_BYTES or (code not in (0, 2) and OUT_OF_MEMORY.search(words)):
        return "over_2_gb"
    if code is None:
        return "crash"
    if code not in (0, 2) or "Traceback (most recent call last)" in words:
        return "traceback"
    strange = CONTROL.search(words) or CONTROL.search(output) or len(output) >= MAX_OUTPUT_BYTES
    if strange or "Warning:" in words or "panicked at" in words:
        return "untidy"
    if code == 0:
        return "fine"
    return "refused" if _is_one_sentence(words, logs) else "untidy"


def _is_one_sentence(words: str, logs: bool) -> bool:
    lines = words.splitlines()
    sentences = [line for line in lines if line.startswith("error: ") and line.removeprefix("error: ").strip()]
    return (
        sentences == lines[-1:]
        and len(sentences) == 1
        and (logs or len(lines) == 1)
        and max(map(len, lines)) <= MAX_SENTENCE_CHARS
    )


def _be_child(function: Callable[[], int | None], out: Path, err: Path, begun: Path) -> None:
    code = 1
    try:
        os.setsid()
        begun.write_text(str(_resident_bytes()), encoding="utf-8")
        for number, path in ((1, out), (2, err)):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            os.dup2(opened, number)
            os.close(opened)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        # the parent may have replaced them, as pytest does
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.disable()  # pytest's handler would print to its terminal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
        limit = _virtual_bytes() + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        code = function() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> tuple[int | None, resource.struct_rusage]:
    """Waits for `child` and returns its status, None at the time limit; kills the processes that it started."""
    opened = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([opened], [], [], WALL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not ready:
                os.kill(child, signal.SIGKILL)
            os.killpg(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
    finally:
        os.close(opened)
    return status if ready else None, usage


def _read(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace")
    return ""


def _ending(status: int | None, words: str) -> str:
    """Returns the last lines of stderr, and the signal or time limit that ended the process."""
    lines = words.strip().splitlines()[-3:]
    if status is None:
        lines.append(f"ended after {WALL_S:.0f} s")
    elif os.WIFSIGNALED(status):
        lines.append(f"died of {signal.Signals(os.WTERMSIG(status)).name}")
    return "\n".join(line[:MAX_SENTENCE_CHARS] for line in lines)


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
