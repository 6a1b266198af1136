"""Runs the commands of a page in one bash, as a reader with one terminal does."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.pages import RUN, Step

TIME_LIMIT_S = 1200
MARK = "=== step"
PORT = "8080"
"""The port of the pages; a free one takes its place, since a server of this machine may have it."""
ENVIRONMENT = {"COLUMNS": "120", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Printed:
    """What the steps of a page printed."""

    texts: dict[int, str]
    """By the step's line; both streams, as a terminal shows them."""
    exit_code: int

    @property
    def failed_line(self) -> int:
        """The line of the last step that was run: the one that failed, if one did."""
        return max(self.texts, default=0)


def run(steps: Sequence[Step], folder: Path, environment: Mapping[str, str] | None = None) -> Printed:
    """Runs steps in `folder`, up to the first command that fails, and ends what they left running.

    Args:
        steps: Of one page, in its order.
        folder: Where the shell starts.
        environment: Variables of the shell; None for those of this process.
    """
    port = _free_port()
    script = "set -eo pipefail\n" + "".join(_lines(step).replace(PORT, port) for step in steps if not step.exempt)
    log = folder / ".page.log"
    programs = os.pathsep.join((f"{sys.prefix}/bin", os.environ["PATH"]))
    # What pytest is told of threads and of its environment, and by make, is not the reader's.
    kept = {
        name: value
        for name, value in (environment or os.environ).items()
        if not name.startswith(("PYTEST", "OMP_", "VIRTUAL", "MAKE", "MFLAGS"))
    }
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=kept | ENVIRONMENT | {"PATH": programs},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(TIME_LIMIT_S)
        finally:
            _end(shell)
    text = log.read_text(encoding="utf-8").replace(port, PORT).replace(f"{folder}/", "")
    text = text.replace(f"{sys.prefix}/bin/", ".venv/bin/")
    return Printed(dict(_divided(text)), code)


def _lines(step: Step) -> str:
    """Returns the lines of bash that run a step, or write its file."""
    if step.kind not in RUN:
        return f"cat > {step.title} <<'END_OF_BLOCK'\n{step.text}END_OF_BLOCK\n"
    mark = f"echo; echo '{MARK} {step.line}'\n"
    if step.kind == "python":
        return f"{mark}python - <<'END_OF_BLOCK'\n{step.text}END_OF_BLOCK\n"
    return f"{mark}{step.text}"


def _divided(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line of a step, what it printed)."""
    for part in text.split(f"\n{MARK} ")[1:]:
        line, _, printed = part.partition("\n")
        yield int(line), printed


def _free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def _end(shell: subprocess.Popen[bytes]) -> None:
    """Ends the shell's process group: a page may leave a server running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
