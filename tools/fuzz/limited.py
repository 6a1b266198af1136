"""One command in a process of its own: forked, so that nothing is imported again; limited in time and memory; its end
sorted into a class.

What a program may do to whoever gave it bad input is to say one sentence. Everything else has a class here, so that a
campaign can count it: a traceback, death by a signal, endless work, memory without bounds, or words that are not one
plain line.
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
"""What no input may lead to."""
MEMORY_BYTES = 2_000_000_000
"""That a command may have in use, beside what the process had when it was forked."""
ADDRESS_BYTES = 2_500_000_000
"""That it may ask for: what asks for more must say so in its sentence, and what uses more than the above is seen."""
CPU_S = 30
"""Processor time, so that a busy machine makes nobody hang: the artifacts here take a command less than 0.3 s. The
first preflight of a campaign imports what all stages need, which takes 12 s."""
WALL_S = 600.0
MAX_SENTENCE_CHARS = 1000
MAX_OUTPUT_BYTES = 4 << 20
MAX_FILE_BYTES = 256 << 20
OUT_OF_MEMORY = re.compile(r"MemoryError|bad_alloc|memory allocation of|Unable to allocate|Cannot allocate memory")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What moves a cursor, starts an escape sequence or turns the direction of writing."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    kind: str
    """One of CLASSES."""
    words: str
    """What it said on stderr, or why it was ended; at most a few lines."""
    output: str
    """Its stdout."""

    @property
    def signature(self) -> tuple[str, str]:
        """Equal for failures that are likely to be one defect: figures and quoted texts do not count."""
        last = (self.words.strip().splitlines() or [""])[-1]
        return self.kind, re.sub(r"'[^']*'|\d+", "*", last)[:120]


def run_limited(function: Callable[[], int | None], scratch: Path, logs: bool = False) -> Ended:
    """Runs `function` in a forked process; its result is the exit code.

    Args:
        function: What to run; what it prints is kept.
        scratch: A folder for what it prints.
        logs: Whether notices may stand on stderr before the sentence, as those of the compiler do.
    """
    out, err, begun = scratch / "stdout", scratch / "stderr", scratch / "resident"
    begun.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _be_child(function, out, err, begun)  # never returns
    status, usage = _wait(child)
    output, words = _read(out), _read(err)
    # from what the child began with: of what its parent has mapped from files a fork takes over nothing
    grown_bytes = 1024 * usage.ru_maxrss - int(_read(begun) or 0)
    return Ended(classify(status, words, output, grown_bytes, logs), _ending(status, words), output)


def classify(status: int | None, words: str, output: str, grown_bytes: int, logs: bool = False) -> str:
    """The class of an end.

    Args:
        status: As os.wait gives it; None if the time was over.
        words: All of stderr.
        output: All of stdout.
        grown_bytes: How much more memory than at its begin the process had at most.
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
        # whoever forked, a test for one, may have put something else in their place
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.disable()  # a test's would print to its own terminal
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
    """The status of `child`, None if it had to be ended; whatever it started ends with it."""
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
    """The last lines of what was said, and the signal if one ended the process."""
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
