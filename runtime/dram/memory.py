"""Asks the system for the memory of this machine, of the control groups around this process, and of the process."""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple


def give_back_heap() -> None:
    """Gives freed pages of the C library's heap back to the system, if the library has malloc_trim. Without this call
    glibc gives back only pages at the end of the heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class GroupMemory(NamedTuple):
    """The memory of a control group with a limit, such as a container or a cluster job."""

    limit_bytes: int
    left_bytes: int
    """Free bytes below the limit; inactive file caches count as free."""


def physical_bytes(root: Path = Path("/")) -> int:
    """Returns the most memory that this process can have: the machine's, or the least limit of its control groups."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(group.limit_bytes for group in memory_groups(root))])


def memory_groups(root: Path = Path("/")) -> Iterator[GroupMemory]:
    """Yields the control groups around this process that limit its memory, of version 1 and 2. `root` is the folder
    that contains proc/self/cgroup and sys/fs/cgroup."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, group = line.split(":", 2)
        if kinds == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        path = PurePosixPath(group.lstrip("/"))
        # parent groups limit it, too; in a container the path may be the host's, so that only the top exists here
        found = (_group_memory(top / parent, *names) for parent in (path, *path.parents))
        yield from (memory for memory in found if memory is not None)


def _group_memory(folder: Path, limit: str, usage: str, cache: str) -> GroupMemory | None:
    """Reads the memory of one group; None if it has no limit, or no such files."""
    try:
        most, used = ((folder / name).read_text().strip() for name in (limit, usage))
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if not most.isdigit():
        return None
    cached = dict(line.rsplit(maxsplit=1) for line in lines).get(cache, "0")
    return GroupMemory(int(most), max(0, int(most) - int(used) + int(cached)))


def rss_bytes() -> int:
    """Returns the present resident memory of this process and its tokenizer's; the peak if the system tells no other.
    On Linux the peak of a fresh process may be that of the process which started it."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return peak_rss_bytes()
    return int(pages) * os.sysconf("SC_PAGE_SIZE") + _of_children("VmRSS")


def peak_rss_bytes() -> int:
    """Returns the peak resident memory: weights, tables, libraries, the interpreter, and the tokenizer's process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak if sys.platform == "darwin" else peak * 1024) + _of_children("VmHWM")  # kilobytes on Linux


def _of_children(figure: str) -> int:
    """Returns a figure of /proc/PID/status, in bytes, over the processes that this one runs; 0 where it is not told."""
    total = 0
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread or a process has ended meanwhile
            for pid in file.read_text().split():
                line = re.search(rf"{figure}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                total += 1024 * int(line[1]) if line else 0
    return total
