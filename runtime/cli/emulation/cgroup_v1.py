"""Caps by Linux' first control groups, as root: blkio.throttle.* and memory.limit_in_bytes.

A group of its own is made below the one that this process is in, so that limits of that one go on. It is gone when the
command has ended; what the command left running is killed with it. Where this process itself was killed, its group goes
when the next one begins.
"""

import os
import signal
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from coldpress.runtime.cli.emulation.caps import Caps
from coldpress.runtime.cli.emulation.disk import Disk

CONTROLLERS = ("blkio", "memory")
PREFIX = "coldpress-"
"""Of a group's name, before the number of the process that makes it."""
RULES = ("blkio.throttle.read_iops_device", "blkio.throttle.read_bps_device")
"""Files that hold a line for each disk that is capped."""
PATIENCE_S = 5.0
"""For processes that were killed to be gone."""
JOIN = 'for group; do shift; [ "$group" = -- ] && break; echo $$ > "$group/cgroup.procs" || exit 125; done; exec "$@"'
"""What a shell does before it becomes the command: its own process joins the groups."""


def hierarchies(proc: Path = Path("/proc")) -> dict[str, Path]:
    """Controller -> the folder of the group that this process is in."""
    own: dict[str, str] = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    found: dict[str, Path] = {}
    for line in (proc / "self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        for name in CONTROLLERS:
            if kind == "cgroup" and name in options.split(","):
                below = Path(folder) / own.get(name, "/").lstrip("/")
                found[name] = below if below.is_dir() else Path(folder)
    return found


def why_not(disk: Disk, proc: Path = Path("/proc")) -> str | None:
    """Why it cannot cap this disk here; None where it can."""
    try:
        found = hierarchies(proc)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    missing = [name for name in CONTROLLERS if name not in found]
    if missing:
        return f"no controller {' and '.join(missing)} is mounted"
    if not (found["blkio"] / "cgroup.procs").exists() or not os.access(found["blkio"], os.W_OK):
        return f"{found['blkio']} is not writable for this user"
    throttle = found["blkio"] / "blkio.throttle.io_serviced"
    return None if throttle.exists() else f"the kernel has no throttling of {disk.name} ({throttle} is missing)"


@contextmanager
def limited(caps: Caps, disk: Disk, proc: Path = Path("/proc")) -> Generator[list[str]]:
    """The words before a command that have it run in groups with these caps; the groups go when this ends."""
    found = hierarchies(proc)
    for group in left_behind(found.values()):
        remove(group)
    groups = {name: found[name] / f"{PREFIX}{os.getpid()}" for name in CONTROLLERS}
    try:
        for group in groups.values():
            group.mkdir(exist_ok=True)
        for name, file, value in settings(caps, disk):
            (groups[name] / file).write_text(value)
        yield ["/bin/sh", "-c", JOIN, "sh", *map(str, groups.values()), "--"]
    finally:
        for group in groups.values():
            remove(group)


def settings(caps: Caps, disk: Disk) -> list[tuple[str, str, str]]:
    """(controller, file of its group, what is written to it), in the order in which the kernel takes them."""
    return [
        ("blkio", RULES[0], f"{disk.number} {caps.reads_per_s}"),
        ("blkio", RULES[1], f"{disk.number} {caps.bytes_per_s}"),
        ("memory", "memory.limit_in_bytes", str(caps.memory_bytes)),
    ]


def left_behind(folders: Iterable[Path]) -> list[Path]:
    """Groups below these whose processes are gone that would have removed them."""
    found = (group for folder in folders for group in sorted(folder.glob(f"{PREFIX}*")))
    return [group for group in found if not _runs(group.name.removeprefix(PREFIX))]


def _runs(number: str) -> bool:
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):  # somebody else's process, or group
        return True
    return True


def remove(group: Path) -> None:
    """Lifts a group's caps, under which what is left in it might read for hours, kills it and removes the group.

    Another process may be doing the same.
    """
    for rule in RULES:
        with suppress(FileNotFoundError):  # of another controller, or gone
            for line in (group / rule).read_text().splitlines():
                (group / rule).write_text(f"{line.split()[0]} 0")
    end = time.monotonic() + PATIENCE_S
    while group.exists():
        with suppress(FileNotFoundError):
            for line in (group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)
        try:
            group.rmdir()
        except OSError:  # what was killed is not gone yet
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
