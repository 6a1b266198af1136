"""Has the kernel count the memory of a command, with the pages of files that it brought into the page cache.

A control group of version 1 counts them; only root may make one.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from coldpress.runtime.cli.emulation.cgroup_v1 import JOIN, PREFIX, hierarchies, remove
from coldpress.schemas.errors import ColdpressError

USAGE, PEAK = "memory.usage_in_bytes", "memory.max_usage_in_bytes"


class MemoryGroup:
    """A control group whose memory is counted, and not limited."""

    def __init__(self, folder: Path) -> None:
        """Takes the group's folder."""
        self.folder = folder

    @property
    def words(self) -> list[str]:
        """The words before a command that run it in the group."""
        return ["/bin/sh", "-c", JOIN, "sh", str(self.folder), "--"]

    def begin(self) -> int:
        """Returns the bytes in use, and counts the peak from here on."""
        (self.folder / PEAK).write_text("0")
        return self.used_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes in use now."""
        return int((self.folder / USAGE).read_text())

    @property
    def peak_bytes(self) -> int:
        """The most bytes since `begin`, also after the command has ended."""
        return int((self.folder / PEAK).read_text())


def drop_pages(folder: Path) -> None:
    """Drops the pages of a folder's files from the page cache: the kernel counts a page for the group that reads it in,
    and not for one that finds it there."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # pages that are not yet on disk stay
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


@contextmanager
def memory_group() -> Generator[MemoryGroup]:
    """Yields a new group, which is removed at the end.

    Raises:
        ColdpressError: if the kernel has no such groups.
    """
    parent = hierarchies().get("memory")
    if parent is None:
        raise ColdpressError(
            "no memory controller of control groups, version 1, is mounted, expected one that counts a command's "
            "memory; run it on a machine that has one"
        )
    folder = parent / f"{PREFIX}{os.getpid()}"
    try:
        folder.mkdir()
        yield MemoryGroup(folder)
    finally:
        remove(folder)
