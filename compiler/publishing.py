"""Publishes folders in one step: whatever happens, the visible folder is whole: the old one, the new one, or none.

Everything is written into a hidden folder beside the target, synced bottom-up, and then renamed to the target; an
existing folder is exchanged, not deleted first. A builder holds a lock on its hidden folder, so that the next builder
can tell a killed run's leftovers from a running one's work. `package` writes an artifact this way, and `publish` moves
it to its final name: it is in one place at a time, and `standing` finds it. Beside each place is a link to the
manifest, wherever that is now: Snakemake may delete the link, or find it missing.
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
    """Yields an empty folder; replaces `target` by it when the block ends, deletes it when the block fails. Raises
    ColdpressError if `target` exists and is not an artifact, OSError from the file system, such as ENOSPC."""
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
    """Renames `folder` to `target` in one step, in place of an artifact; raises ColdpressError for anything else."""
    _refuse_foreign(target)
    remove_leftovers(target)
    make_folder(target.parent)
    _replace(folder, target)
    sync_folder(target.parent)
    sync_folder(folder.parent)
    remove(folder)  # after an exchange, this is the replaced artifact


def remove(target: Path) -> None:
    """Deletes a folder, if it exists: it loses its name in one step, and its files afterwards."""
    remove_leftovers(target)
    if target.exists():
        aside = _hidden(target)
        target.rename(aside)
        sync_folder(target.parent)
        shutil.rmtree(aside, ignore_errors=True)


def point(beside: Path, folder: Path) -> None:
    """Links `manifest.json` beside an artifact's place to the manifest in `folder`, with that file's time."""
    link, manifest = beside.parent / MANIFEST_FILE, folder / MANIFEST_FILE
    temporary = link.with_name(f".{MANIFEST_FILE}.tmp")  # one job at a time writes here
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(manifest, link.parent))
    try:
        written_ns = manifest.stat().st_mtime_ns
        os.utime(temporary, ns=(written_ns, written_ns), follow_symlinks=False)
        temporary.replace(link)
    finally:
        temporary.unlink(missing_ok=True)  # a refused rename leaves it


def standing(package: Package, *others: Path) -> Path:
    """Returns the artifact's place: where it was written, where the link beside that leads, or one of `others`. Raises
    ColdpressError if it is in none of them."""
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


def check_verified(artifact_sha256: str, package: Package) -> None:
    """Raises ColdpressError if a verification is of another artifact than the package's."""
    if artifact_sha256 != package.manifest_sha256:
        raise ColdpressError(
            f"the verification is of artifact {artifact_sha256[:12]}, the package is "
            f"{package.manifest_sha256[:12]}; run verify again"
        )


def identity(folder: Path) -> str | None:
    """Returns the sha256 of an artifact's manifest; None where there is no artifact."""
    manifest = folder / MANIFEST_FILE
    return sha256_of(manifest) if manifest.is_file() else None


def _refuse_foreign(target: Path) -> None:
    empty = target.is_dir() and not any(target.iterdir())
    if target.is_symlink() or (target.exists() and not empty and not (target / MANIFEST_FILE).is_file()):
        raise ColdpressError(
            f"{target} exists and is no artifact (a folder with {MANIFEST_FILE}); remove it or choose another path"
        )


def _hidden(target: Path) -> Path:
    """Returns a new hidden name beside `target`; random, because builders in two containers may share a process id."""
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")


def _create_locked(target: Path) -> tuple[Path, int]:
    """Creates a hidden folder of this process; returns it and the descriptor that holds its lock."""
    while True:
        folder = _hidden(target)
        folder.mkdir()
        try:  # another builder may delete it as a leftover before it is locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def remove_leftovers(target: Path) -> None:
    """Deletes hidden folders whose builder has ended; skips those that a running builder has locked. A killed builder
    may have renamed a folder in memory alone, so that on disk it is still visible: the rename is synced first."""
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
    """Syncs every folder's entries to disk, the innermost first; files were synced when they were finished."""
    for path, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(path))


def _replace(folder: Path, target: Path) -> None:
    """Puts `folder` in the place of `target`; an old `target` becomes `folder`."""
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
        except OSError as error:  # another builder published in between: the next round exchanges with its folder
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one step; returns False where the system or the file system cannot."""
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
    """Replaces by two renames: for a moment there is no artifact, but never a partial one."""
    aside = _hidden(target)
    target.rename(aside)
    folder.rename(target)
    sync_folder(target.parent)  # before the deletion: on disk, the old folder may still have the visible name
    shutil.rmtree(aside, ignore_errors=True)
