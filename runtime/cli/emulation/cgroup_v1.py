"""Caps a command with Linux control groups, version 1, as root: blkio.throttle.* and memory.limit_in_bytes.

It makes a new group below this process's group, so that the limits of the latter still hold. It removes the group when
the command has ended, and kills processes that the command left running. If this process itself is killed, the next one
removes its group.
"""

import os
import signal
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from coldpress.runtime.cli.emulation.disk import Caps, Disk

CONTROLLERS = ("blkio", "memory")
PREFIX = "coldpress-"
"""Beginning of a group's name, before the number of the process that makes the group."""
RULES = ("blkio.throttle.read_iops_device", "blkio.throttle.read_bps_device")
"""Files of a group that hold a line for each capped disk."""
PATIENCE_S = 5.0
"""Time for killed processes to disappear."""
JOIN = 'for group; do shift; [ "$group" = -- ] && break; echo $$ > "$group/cgroup.procs" || exit 125; done; exec "$@"'
"""A shell script that joins the groups and then becomes the command, so that the command is capped from its start."""


def hierarchies(proc: Path = Path("/proc")) -> dict[str, Path]:
    paths: dict[str, str] = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    found: dict[str, Path] = {}
    for line in (proc / "self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        for name in CONTROLLERS:
            if kind == "cgroup" and name in options.split(","):
                below = Path(folder) / paths.get(name, "/").lstrip("/")
                # in a container the path may be the host's, so that only the top folder exists here
                found[name] = below if below.is_dir() else Path(folder)
    return found


def why_not(disk: Disk, proc: Path = Path("/proc")) -> str | None:
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
    """Yields the words before a command that run it in groups with these caps; removes the groups at the end."""
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
    """Returns (controller, file of its group, value to write), in the order in which the kernel takes them."""
    return [
        ("blkio", RULES[0], f"{disk.number} {caps.reads_per_s}"),
        ("blkio", RULES[1], f"{disk.number} {caps.bytes_per_s}"),
        ("memory", "memory.limit_in_bytes", str(caps.memory_bytes)),
    ]


def left_behind(folders: Iterable[Path]) -> list[Path]:
    """Returns the groups below `folders` whose makers died before they removed them."""
    found = (group for folder in folders for group in sorted(folder.glob(f"{PREFIX}*")))
    return [group for group in found if not _runs(group.name.removeprefix(PREFIX))]


def _runs(number: str) -> bool:
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):  # another user's process, or a group with another naming scheme
        return True
    return True


def remove(group: Path) -> None:
    """Lifts a group's caps, kills its processes and removes the group; another process may be doing the same. The caps
    go first: under them a killed process could take hours to finish its reads."""
    for rule in RULES:
        with suppress(FileNotFoundError):  # a file of another controller, or a group that is gone
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
        except OSError:  # the killed processes are not gone yet
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
