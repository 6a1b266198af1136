"""Opens files of an artifact's folder; no name can lead out of the folder, and no link is followed.

Names are checked as text first. Then every component is opened relative to the folder's descriptor, without following
links. The opened file must be a regular file with one name and the size that the manifest gives.
"""

import errno
import os
import re
import stat
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

from coldpress.runtime.artifact.errors import DeviceError, FileKindError, FileNameError, FileSizeError, short

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}(?<!\.)")
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)  # devices on Windows
MAX_PARTS = 4
REGULAR = "a regular file with one name"
WORDS: Mapping[int | None, str] = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "not in a folder",
    errno.ELOOP: "a link",
    errno.EMLINK: "a link",
    errno.ENXIO: "a socket",
}
"""Error number of opening -> what it says about the artifact; all other numbers are faults of the system."""
REMEDIES: Mapping[int, str] = {
    errno.EACCES: "give yourself the right to read the artifact",
    errno.EPERM: "give yourself the right to read the artifact",
    errno.EMFILE: "let this process open more files (ulimit -n)",
    errno.ENFILE: "let the system open more files",
    errno.ENOMEM: "free some memory",
}


def check_names(names: Iterable[str], file: str) -> None:
    """Refuses names that are unsafe on any system, or that differ only in letter case. Raises `FileNameError` naming
    the entry of `file`."""
    seen: dict[str, str] = {}
    for index, name in enumerate(names):
        field = f"files[{index}].path"
        parts = name.split("/")
        if len(parts) > MAX_PARTS or not all(NAME.fullmatch(part) and not RESERVED.fullmatch(part) for part in parts):
            raise FileNameError(file, field, short(name), "a relative name of letters, digits, '.', '_' and '-'")
        if name.casefold() in seen:
            raise FileNameError(file, field, f"'{name}' beside '{seen[name.casefold()]}'", "distinct names")
        seen[name.casefold()] = name


class Folder:
    """An open folder; closed by `close`, or when nothing refers to it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)


def open_folder(path: str) -> Folder:
    """Opens an artifact's folder. Raises `FileKindError` if there is none, `DeviceError` if the system refuses."""
    try:
        return Folder(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in WORDS:
            raise refused(path, "opening it", error) from error
        remedy = "give the path of an artifact"
        raise FileKindError(path, "the artifact", WORDS[error.errno], "a folder", remedy) from error


def open_file(folder: Folder, name: str, size_bytes: int | None = None, flags: int = 0) -> int:
    """Opens a file for reading and returns its descriptor; `name` has passed `check_names`.

    Args:
        size_bytes: The size that the file must have; None if any.
        flags: Further flags for opening, such as O_DIRECT.

    Raises:
        FileKindError: if there is no such file, or it is a link or anything but a regular file.
        FileSizeError: if its size differs.
        DeviceError: if the system refuses to open it.
    """
    try:
        with _parent(folder.descriptor, name) as parent:
            # O_NONBLOCK: opening a pipe must not wait for a writer.
            last = name.rpartition("/")[2]
            opened = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | flags, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.EINVAL and flags:  # the file system lacks the flag: the caller decides what to do
            raise
        if error.errno not in WORDS:
            raise refused(name, "opening it", error) from error
        raise FileKindError(name, "the file", WORDS[error.errno], REGULAR) from error
    try:
        _check_opened(opened, name, size_bytes)
        with telling(name, "opening it"):
            # else the kernel reads megabytes ahead into its page cache, which is outside the DRAM budget
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    except BaseException:
        os.close(opened)
        raise
    return opened


@contextmanager
def _parent(folder: int, name: str) -> Generator[int]:
    current = os.dup(folder)
    try:
        for part in name.split("/")[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = inner
        yield current
    finally:
        os.close(current)


def _check_opened(opened: int, name: str, size_bytes: int | None) -> None:
    with telling(name, "opening it"):
        status = os.fstat(opened)
    if not stat.S_ISREG(status.st_mode):
        raise FileKindError(name, "the file", stat.filemode(status.st_mode), REGULAR)
    if status.st_nlink > 1:
        raise FileKindError(
            name, "the file", f"a hard link, one of {status.st_nlink} names", REGULAR, "copy the artifact"
        )
    if size_bytes is not None and status.st_size != size_bytes:
        raise FileSizeError(name, "the size", f"{status.st_size} bytes", f"{size_bytes}, as the manifest says")


def read_exactly(opened: int, name: str, into: memoryview, offset: int) -> None:
    """Fills `into` from `offset` of a file. Raises `FileSizeError` if it was cut short while open, `DeviceError` if the
    device fails."""
    done = 0
    while done < len(into):
        with telling(name, "a read"):
            count = os.preadv(opened, [into[done:]], offset + done)
        if count == 0:
            raise FileSizeError(name, "the size", f"{offset + done} bytes", f"at least {offset + len(into)}")
        done += count


@contextmanager
def telling(name: str, step: str) -> Generator[None]:
    """Turns a system error on a file into a DeviceError, since it does not mean that the artifact is wrong."""
    try:
        yield
    except OSError as error:
        raise refused(name, step, error) from error


def refused(name: str, step: str, error: OSError) -> DeviceError:
    remedy = REMEDIES.get(error.errno or 0, "check the storage device")
    return DeviceError(name, step, f"failing ({os.strerror(error.errno or 0)})", "data", f"{remedy}, then try again")
