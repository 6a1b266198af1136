"""Saves and loads records and arrays, hashes contents, and keeps the resumable workspace of a stage.

A record is one JSON file; its arrays lie in the folder of the same name without `.json`. Everything is written to a
temporary name, synced and renamed, so a file that exists is whole. A stage checks digests of everything it loads: a
record contains its own digest (schemas/sealed.py) and those of its array files. Snakemake deletes the declared outputs
of a job that failed, record and folder. So a stage works in a hidden folder, which gets its final name when the stage
ends (`save_result`); `Workspace.once` lets a long stage resume there: a file beside each array file states its inputs'
fingerprint and its content's digest. A file whose name ends with PACKED is compressed; its digest is that of the
compressed bytes, which is checked before anything is unpacked.

A record may be a link into a cache of results. Its paths begin at the link's own folder, not where the link leads.
"""

import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save, save_file

from coldpress.runtime.artifact.byte_planes import pack, unpack
from coldpress.schemas.base import ArrayFile, Record, Sha256
from coldpress.schemas.errors import ColdpressError, clipped
from coldpress.schemas.sealed import seal, unseal

log = logging.getLogger(__name__)
PATH_KEYS = ("array_file", "file", "folder")
"""Record fields that hold paths: absolute in memory, relative to the record's folder on disk."""
PACKED = ".safetensors.zst"
FETCHED = re.compile(r"/\.snakemake/storage/(?P<provider>\w+)/(?P<name>.+)")
"""Place where Snakemake puts what it fetches from an object store."""
R = TypeVar("R", bound=Record)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_HASHING = threading.Lock()
"""Hash one array file at a time, so that threads that need the same file do not each read all of it."""


@functools.lru_cache(maxsize=8192)
def _content(path: Path, inode: int, size_bytes: int, changed_ns: int) -> str:
    return sha256_of(path)


def _file_digest(path: Path) -> str:
    """Returns the hex digest of a file; an unchanged file that this process has hashed is not read again."""
    status = path.stat()
    with _HASHING:
        return _content(path, status.st_ino, status.st_size, status.st_mtime_ns)


def checked_path(source: ArrayFile) -> Path:
    """Returns an array file's path; raises ColdpressError if it is missing or has changed since its stage ended."""
    path = Path(source.array_file)
    return checked_file(path, source.sha256, f"{path.parent}.json")


def checked_file(path: Path, sha256: str, record: str) -> Path:
    """Returns the path of a finished stage's file after checking its content against `sha256` from `record`. Raises
    ColdpressError if the file is missing or has changed since."""
    remedy = f"{deletion(Path(record))}, then build again"
    try:
        found = _file_digest(path)
    except OSError as error:
        raise ColdpressError(
            f"{path}: a file of a finished stage cannot be read ({error.strerror}); {remedy}"
        ) from error
    if found != sha256:
        raise ColdpressError(
            f"{path}: the sha256 begins with {found[:12]}, expected {sha256[:12]} as its record says: the file "
            f"was damaged or changed after its stage ended; {remedy}"
        )
    return path


def deletion(record: Path) -> str:
    """Says how to delete a record: the file, its target if it links into a cache, or the object in the store."""
    if stored := FETCHED.search(str(record)):
        return f"delete {stored['provider']}://{stored['name']}"
    if not record.is_symlink():
        return f"delete {record}"
    cached = record.parent.resolve() / os.readlink(record)
    return f"delete {record} and, in the cache, {str(cached).removesuffix('record.json')}*"


def own_cache() -> Path:
    """Returns the folder of what is downloaded or converted once for all builds; COLDPRESS_CACHE names another."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coldpress"
    return Path(os.environ.get("COLDPRESS_CACHE") or usual).expanduser().absolute()


def digest(*parts: str) -> str:
    """Returns the hex digest of texts; the boundaries between them count."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Adds the file name to system errors that have only a descriptor, as fsync's do, or a temporary name."""
    try:
        yield
    except OSError as error:
        named = None if isinstance(error.filename, int) else error.filename
        if error.errno is not None and named in (None, str(temporary)):
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(folder):
            os.fsync(opened)
    finally:
        os.close(opened)


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, each synced to disk before anything is put into it."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


@contextmanager
def replacing(path: Path, before: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success syncs it, calls `before`, and renames it to `path`, else
    removes it. The folder is synced afterwards: a record that survives a power cut finds the arrays that were finished
    before it."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path, temporary):
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            if before is not None:
                before()
            temporary.replace(path)
        sync_folder(path.parent)
    finally:
        with suppress(OSError):  # it would hide the first error; the next run of the job removes the file
            temporary.unlink(missing_ok=True)


def save_record(record: Record, path: Path, before: Callable[[], None] | None = None) -> None:
    """Writes `record` as JSON with paths relative to `path`'s folder and the digest in the second line; `before` as in
    `replacing`."""
    folder = path.parent.resolve()
    data = _map_paths(record.model_dump(mode="json"), lambda value: os.path.relpath(value, folder))
    text = seal(json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    with replacing(path, before) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_result(record: R, path: Path, work: Path) -> R:
    """Saves a stage's record, whose paths lead into `work` beside `path`, and just before it renames `work` to the
    folder of its array files; returns the record with the final paths. Both changes come last, one right after the
    other: until then, a killed or failed job leaves its finished array files in `work`."""
    final = path.parent.resolve() / path.stem
    make_folder(work)

    def moved(value: str) -> str:
        return str(final / Path(value).relative_to(work)) if Path(value).is_relative_to(work) else value

    found = type(record).model_validate_json(json.dumps(_map_paths(record.model_dump(mode="json"), moved)))
    save_record(found, path, before=lambda: _rename_folder(work, final))
    return found


def _rename_folder(work: Path, final: Path) -> None:
    aside = final.with_name(f".{final.name}.replaced.work")
    if final.is_symlink():  # to a folder of a cache
        final.unlink()
    elif final.exists():
        final.rename(aside)
        sync_folder(final.parent)
    work.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def load_record(path: Path, kind: type[R]) -> R:
    """Reads a record; its paths become absolute. Raises ColdpressError if it is missing, changed, or not a `kind`."""
    folder = path.parent.resolve()
    try:
        opened = unseal(path.read_bytes())
    except OSError as error:
        sentence = f"no such {kind.__name__} record" if error.errno == errno.ENOENT else f"{error.strerror}"
        raise ColdpressError(f"{path}: {sentence}; run the stage that writes it first") from error
    if opened.stated != opened.found:
        raise ColdpressError(
            f"{path}: the sha256 of the record begins with {opened.found[:12]}, expected "
            f"{opened.stated[:12] if opened.stated else 'one in its second line'}: the file was damaged or changed "
            f"after its stage ended; {deletion(path)}, then build again"
        )
    try:
        absolute = _map_paths(json.loads(opened.body), lambda value: os.path.normpath(folder / value))
        return kind.model_validate_json(json.dumps(absolute))
    except ValidationError as error:
        remedy = f"{deletion(path)}, then build again"
        raise ColdpressError(f"{path}: not a {kind.__name__} record of this version; {remedy}") from error


def _map_paths(data: Any, change: Callable[[str], str]) -> Any:
    if isinstance(data, dict):
        return {
            key: change(value) if key in PATH_KEYS and isinstance(value, str) else _map_paths(value, change)
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [_map_paths(value, change) for value in data]
    return data


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> ArrayFile:
    """Writes arrays to one safetensors file, compressed if its name ends with PACKED."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
    with replacing(path) as temporary:
        if path.name.endswith(PACKED):
            temporary.write_bytes(pack(save(contiguous)))
        else:
            _save_plain(contiguous, temporary, path)
    return array_file(path)


def _save_plain(arrays: dict[str, np.ndarray], temporary: Path, path: Path) -> None:
    try:
        save_file(arrays, temporary)
    except SafetensorError as error:  # it gives the system's error only as text
        told = re.search(r"\(os error (\d+)\)", str(error))
        if told is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from error


def array_file(path: Path) -> ArrayFile:
    return ArrayFile(array_file=str(path.resolve()), sha256=_file_digest(path))


def load_arrays(source: ArrayFile, *names: str) -> dict[str, np.ndarray]:
    """Loads the named arrays of a file, or all; raises ColdpressError if it is missing or damaged, or lacks one."""
    path = checked_path(source)
    try:
        if path.name.endswith(PACKED):
            arrays = load(unpack(path.read_bytes()))
            return {name: arrays[name] for name in names or arrays}
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in names or file.keys()}
    except (
        SafetensorError,
        OSError,
        ValueError,
        KeyError,
    ) as error:  # SafetensorError gives the system's error only as text
        raise ColdpressError(
            f"{path}: cannot read the arrays of a finished stage ({clipped(str(error))}); see to its disk, or "
            f"{deletion(Path(f'{path.parent}.json'))}, then build again"
        ) from error


class Finished(Record):
    """The file `<key>.done.json` beside an array file of a stage that may still be running."""

    fingerprint: str
    """Digest of everything that the arrays were made from."""
    sha256: Sha256 | None
    """Digest of the array file; None if its rows carry checksums, which are checked as they are read."""


@dataclass(frozen=True)
class Workspace:
    """The working folder of a stage, guarded by a fingerprint of all inputs."""

    folder: Path
    fingerprint: str

    def once(self, key: str, make: Callable[[], Mapping[str, np.ndarray]]) -> ArrayFile:
        """Returns the array file `key`: the one an interrupted run of the same inputs left, else `make()` saved."""
        return self.current(key) or self.save(key, make())

    def record(self, key: str, kind: type[R], make: Callable[[], R]) -> R:
        """Returns the record beside the array file `key`: an interrupted run's with the same inputs, else `make()`.
        `make` saves the array file, whose fingerprint then guards both: the record is written after it and deleted
        before it."""
        path = self.folder / f"{key}.json"
        if path.exists() and self.current(key):
            return load_record(path, kind)
        path.unlink(missing_ok=True)
        made = make()
        save_record(made, path)
        return made

    def save(self, key: str, arrays: Mapping[str, np.ndarray]) -> ArrayFile:
        self.begin(key)
        save_arrays(self.path(key), arrays)
        return self.finish(key)

    def begin(self, key: str) -> Path:
        """Returns the path to write the array file `key` to, by `replacing`; first deletes the mark of an earlier file,
        on disk too: otherwise the new file would count as the earlier one."""
        if self._done(key).exists():
            self._done(key).unlink()
            sync_folder(self.folder)
        return self.path(key)

    def finish(self, key: str) -> ArrayFile:
        """Marks the array file `key`, which has been written, as whole."""
        found = array_file(self.path(key))
        save_record(Finished(fingerprint=self.fingerprint, sha256=found.sha256), self._done(key))
        return found

    def finish_checked_rows(self, key: str) -> None:
        """Does as `finish` for a file whose rows carry checksums, so that it need not be read."""
        save_record(Finished(fingerprint=self.fingerprint, sha256=None), self._done(key))

    def path(self, key: str) -> Path:
        """Returns the path of the array file `key`, or of the compressed one if `key` ends with PACKED."""
        return self.folder / (key if key.endswith(PACKED) else f"{key}.safetensors")

    def remove(self, key: str) -> None:
        self.begin(key).unlink(missing_ok=True)

    def current(self, key: str) -> ArrayFile | None:
        """Returns the array file `key` if a run of the same inputs left it whole; None if it was damaged since."""
        done = self._finished(key)
        if done is None:
            return None
        found = array_file(self.path(key))
        if found.sha256 == done.sha256:
            return found
        log.warning("%s: damaged since an interrupted run wrote it; it is made again", self.path(key))
        return None

    def has(self, key: str) -> bool:
        """Tells whether a run of the same inputs left the array file `key`; does not read its content."""
        return self._finished(key) is not None

    def _finished(self, key: str) -> Finished | None:
        if not (self._done(key).exists() and self.path(key).exists()):
            return None
        done = load_record(self._done(key), Finished)
        return done if done.fingerprint == self.fingerprint else None

    def _done(self, key: str) -> Path:
        return self.folder / f"{key}.done.json"
