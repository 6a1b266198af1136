"""Measures a process: seconds, processor seconds, its largest memory, bytes read from and written to the disk."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SECTOR_BYTES = 512


def processor_s(action: Callable[[], object], times: int = 3) -> float:
    """Returns the processor seconds of `action`, the least of `times` runs: other work on the machine adds to it."""
    taken: list[float] = []
    for _ in range(times):
        before_s = _used_s()
        action()
        taken.append(_used_s() - before_s)
    return min(taken)


def _used_s() -> float:
    """Returns the processor seconds of this process and of the children that it has waited for."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@dataclass(frozen=True)
class Usage:
    """The resources used by one process and by the children that it has waited for."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    stdout: str

    def __add__(self, other: "Usage") -> "Usage":
        """Returns the usage of both, one after the other."""
        return Usage(
            self.wall_s + other.wall_s,
            self.cpu_s + other.cpu_s,
            max(self.peak_rss_bytes, other.peak_rss_bytes),
            self.disk_read_bytes + other.disk_read_bytes,
            self.disk_write_bytes + other.disk_write_bytes,
            self.stdout + other.stdout,
        )


def measured(*arguments: str | Path, folder: Path, environment: dict[str, str] | None = None) -> Usage:
    """Runs this Python with `arguments` in `folder`, waits for it and returns its usage.

    The caller's memory must be small: the measured peak is never below it.

    Raises:
        RuntimeError: with the end of its output, if it fails.
    """
    log = folder / "stderr.log"
    command: Sequence[str] = [sys.executable, *map(str, arguments)]
    start = time.perf_counter()
    with log.open("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        stdout = process.stdout.read() if process.stdout else ""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - start
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}\n{errors.read()[-4000:]}")
    return Usage(
        wall_s,
        used.ru_utime + used.ru_stime,
        used.ru_maxrss * 1024,
        used.ru_inblock * SECTOR_BYTES,
        used.ru_oublock * SECTOR_BYTES,
        stdout,
    )
