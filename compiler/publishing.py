"""A folder that takes its name in one step: whatever happens, the visible one is whole: the old one, the new, or none.

Everything is written into a hidden folder beside the target, synced bottom-up, and then takes the target's name; a
folder that was there is exchanged, not deleted first. A builder holds a lock on its hidden folder, so that the next one
can tell the leftovers of a killed run from the work of a running one. `package` writes an artifact this way, and
`publish` moves it to its final name: it stands in one place at a time, and `standing` finds it. Beside both places lies
a link to its manifest, wherever that is now: what Snakemake may delete, and miss.
"""

import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldpress.compiler.io import make_folder, sha256_of, sync_folder
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.manifest import MANIFEST_FILE
from coldpress.schemas.package import Package

AT_FDCWD = -100
RENAME_EXCHANGE = 2
EXCHANGE_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


@contextmanager
def publishing(target: Path) -> Iterator[Path]:
    """Yields an empty folder; when the block ends it takes the place of `target`, when it fails it goes.

    Raises:
        ColdpressError: if something that is no artifact stands at `target`.
        OSError: of the file system, such as ENOSPC.
    """
    _refuse_foreign(target)
    make_folder(target.parent)
    remove_leftovers(target)
    folder, lock = _create_locked(target)
    try:
        yield folder
        _sync(folder)
        _replace(folder, target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # after an exchange, this is the artifact that was replaced
        os.close(lock)


def move(folder: Path, target: Path) -> None:
    """`folder` takes the name `target` in one step; what stood there goes.

    Raises:
        ColdpressError: if something that is no artifact stands at `target`.
    """
    _refuse_foreign(target)
    remove_leftovers(target)
    make_folder(target.parent)
    _replace(folder, target)
    sync_folder(target.parent)
    sync_folder(folder.parent)
    remove(folder)  # after an exchange, this is what was replaced


def remove(target: Path) -> None:
    """Takes a folder away, if there is one: it loses its name in one step, and its files afterwards."""
    remove_leftovers(target)
    if target.exists():
        aside = _hidden(target)
        target.rename(aside)
        sync_folder(target.parent)
        shutil.rmtree(aside, ignore_errors=True)


def point(beside: Path, folder: Path) -> None:
    """Makes `manifest.json` beside an artifact's place a link to the manifest in `folder`, as old as that."""
    link, manifest = beside.parent / MANIFEST_FILE, folder / MANIFEST_FILE
    temporary = link.with_name(f".{MANIFEST_FILE}.tmp")  # one job at a time writes here
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(manifest, link.parent))
    written_ns = manifest.stat().st_mtime_ns
    os.utime(temporary, ns=(written_ns, written_ns), follow_symlinks=False)
    temporary.replace(link)


def standing(package: Package, *others: Path) -> Path:
    """Where the artifact of a package stands: where it was written, where the link beside that leads, or in one of
    `others`.

    Raises:
        ColdpressError: if it stands in none of them.
    """
    written = Path(package.folder)
    linked = Path(os.path.realpath(written.parent / MANIFEST_FILE)).parent
    places = [place for place in dict.fromkeys((written, linked, *others)) if identity(place)]
    for place in places:
        if identity(place) == package.manifest_sha256:
            return place
    what = ", ".join(f"{place}: the artifact is {(identity(place) or '')[:12]}" for place in places)
    raise ColdpressError(
        f"{what or f'{package.folder}: nothing stands there'}, the package says {package.manifest_sha256[:12]}; run "
        "package again"
    )


def identity(folder: Path) -> str | None:
    """sha256 of an artifact's manifest; None where there is no artifact."""
    manifest = folder / MANIFEST_FILE
    return sha256_of(manifest) if manifest.is_file() else None


def _refuse_foreign(target: Path) -> None:
    empty = target.is_dir() and not any(target.iterdir())
    if target.is_symlink() or (target.exists() and not empty and not (target / MANIFEST_FILE).is_file()):
        raise ColdpressError(
            f"{target} exists and is no artifact (a folder with {MANIFEST_FILE}); remove it or choose another path"
        )


def _hidden(target: Path) -> Path:
    """A new hidden name beside `target`; not the process id, which builders in two containers may share."""
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")


def _create_locked(target: Path) -> tuple[Path, int]:
    """A hidden folder of this process, and the descriptor that holds its lock."""
    while True:
        folder = _hidden(target)
        folder.mkdir()
        try:  # another builder may take it for a leftover before it is locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def remove_leftovers(target: Path) -> None:
    """Takes away hidden folders whose builder is gone; a lock that is held by a running one is respected.

    A builder that was killed may have left one that is hidden in memory alone, and visible on the disk: what it renamed
    is brought there first.
    """
    found = sorted(target.parent.glob(f".{glob.escape(target.name)}.*.tmp"))
    if found:
        sync_folder(target.parent)
    for folder in found:
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _sync(folder: Path) -> None:
    """Brings every folder's entries to the disk, the innermost first; files were synced when they were finished."""
    for path, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(path))


def _replace(folder: Path, target: Path) -> None:
    """`folder` becomes `target`; what was `target` becomes `folder`."""
    while True:
        try:
            if not target.exists():
                folder.rename(target)
            elif not _exchange(folder, target):
                _swap_aside(folder, target)
            return
        except FileNotFoundError:
            if not folder.exists():
                raise
        except OSError as error:  # another builder published in between: next time round there is one to exchange with
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in EXCHANGE_UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(second))


def _swap_aside(folder: Path, target: Path) -> None:
    """Two renames: for a moment there is no artifact, but never a partial one."""
    aside = _hidden(target)
    target.rename(aside)
    folder.rename(target)
    sync_folder(target.parent)  # on the disk, what is deleted next has the visible name until now
    shutil.rmtree(aside, ignore_errors=True)
