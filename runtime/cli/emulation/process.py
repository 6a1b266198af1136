"""Runs a command under limits: forwards our signals to it, and ends it before returning or raising."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType

from coldpress.runtime.cli.emulation.caps import Caps
from coldpress.schemas.errors import ColdpressError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 5.0
"""Time for a command to end after a signal, before it is killed."""


def run_limited(limits: Sequence[str], command: Sequence[str], environment: Mapping[str, str], caps: Caps) -> int:
    """Runs `command` behind the words that limit it; returns its exit code, or 128 + n if signal n ended it.

    Raises:
        ColdpressError: if the kernel killed the command, as it does at the memory cap.
    """
    told: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def tell(number: int, _: FrameType | None) -> None:
        told.append(number)
        if child:
            _signal(child, number)

    before = {number: signal.signal(number, tell) for number in SIGNALS}
    try:
        # a new process group: the terminal's interrupt reaches only us, and we signal the command with its children
        child = subprocess.Popen([*limits, *command], env=dict(environment), process_group=0)
        for number in told:  # signals that came before there was a child
            _signal(child, number)
        code = _wait(child, told)
    finally:
        if child:
            _signal(child, signal.SIGKILL)  # the whole group: processes that the command left running
            child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == -signal.SIGKILL and not told:
        raise ColdpressError(
            f"the command was killed, as the kernel does at the memory cap of {caps.memory_bytes} bytes; give it more "
            "with --memory, or a smaller --dram-budget"
        )
    return 128 - code if code < 0 else code


def _signal(child: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _wait(child: "subprocess.Popen[bytes]", told: Sequence[int]) -> int:
    while not told:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(0.2)
    with suppress(subprocess.TimeoutExpired):
        return child.wait(PATIENCE_S)
    _signal(child, signal.SIGKILL)
    return child.wait()
