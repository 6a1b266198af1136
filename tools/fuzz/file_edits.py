"""Edits files as bytes, and folders: adds, removes, renames and replaces files."""

import os
import random
import shutil
import socket
from pathlib import Path

from tools.fuzz.json_edits import Unfit, strange

NAMES = (
    *("extra", "x.json", "LICENSE", "license", "README.md", ".hidden", "a b", "a{b}.json", "é", "manifest.json.bak"),
    *("-rf", "x\ny", "\x1b[2J", "con", "a.", "%s", "LICENSE.", "LICENSE (x)", "NOTICE" + "x" * 200, "model.bin"),
    *("*", "~", "$HOME", "x.safetensors", "pytorch_model.bin", "tokenizer.model", "adapter_config.json"),
)
CHUNK_BYTES = 4096
GROWTH_BYTES = 1 << 20
DEEPEST = 4
"""Depth of folders that edits look into; deeper folders, which an edit may add, only the commands must survive."""


def files(folder: Path) -> list[Path]:
    """Returns the regular files of a folder, in the same order on every machine."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        if len(Path(parent).relative_to(folder).parts) >= DEEPEST:
            folders.clear()
        found += [Path(parent, name) for name in names]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def pick_file(folder: Path, chance: random.Random) -> Path:
    """Returns a random file of `files`; raises Unfit if there is none."""
    found = files(folder)
    if not found:
        raise Unfit
    return chance.choice(found)


def flip_bits(folder: Path, chance: random.Random) -> str:
    """Flips one to eight bits of a file; half of the time near the beginning, where headers are."""
    path = pick_file(folder, chance)
    data = bytearray(path.read_bytes())
    if not data:
        raise Unfit
    near = chance.random() < 0.5
    flipped = [chance.randrange(8 * (min(len(data), 2000) if near else len(data))) for _ in range(chance.randint(1, 8))]
    for bit in flipped:
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"{path.name}: bits {flipped} flipped"


def cut_or_extend(folder: Path, chance: random.Random) -> str:
    """Cuts or extends a file."""
    path = pick_file(folder, chance)
    data = path.read_bytes()
    size = chance.choice((0, 1, 7, 8, len(data) - 1, len(data) // 2, len(data) + 1, len(data) + 4096, len(data) * 2))
    if chance.random() < 0.02:
        size += GROWTH_BYTES
    size = max(0, size)
    fill = bytes([chance.choice((0, 32, 255))]) * max(0, size - len(data))
    path.write_bytes(data[:size] + fill)
    return f"{path.name}: {size} bytes instead of {len(data)}"


def overwrite(folder: Path, chance: random.Random) -> str:
    """Replaces a run of bytes by zeros, ones, noise or other bytes of the file."""
    path = pick_file(folder, chance)
    data = bytearray(path.read_bytes())
    length = min(len(data), chance.choice((1, 4, 64, CHUNK_BYTES)))
    start, other = chance.randrange(len(data) - length + 1), chance.randrange(len(data) - length + 1)
    fills = {
        "zeros": bytes(length),
        "ones": b"\xff" * length,
        "noise": chance.randbytes(length),
        f"those at {other}": bytes(data[other : other + length]),
    }
    name = chance.choice(list(fills))
    data[start : start + length] = fills[name]
    path.write_bytes(data)
    return f"{path.name}: {length} bytes at {start} replaced by {name}"


def remove_file(folder: Path, chance: random.Random) -> str:
    """Removes one file."""
    path = pick_file(folder, chance)
    path.unlink()
    return f"{path.name} removed"


def add_file(folder: Path, chance: random.Random) -> str:
    """Adds a file, a copy, an empty folder or nested folders, under a plausible or hostile name."""
    name = chance.choice(NAMES) if chance.random() < 0.8 else strange(chance, "name")
    home = chance.choice(sorted({folder, *(path.parent for path in files(folder))}))
    if not isinstance(name, str) or "/" in name or "\0" in name or not name.strip("."):
        raise Unfit
    path = home / name
    if os.path.lexists(path):
        raise Unfit  # a link would be written through
    kind = chance.choice(("file", "file", "empty folder", "deep folders", "copy"))
    try:
        if kind == "file":
            path.write_bytes(chance.choice((b"", b"x", b"{}", chance.randbytes(100), b"a" * GROWTH_BYTES)))
        elif kind == "copy":
            shutil.copyfile(pick_file(folder, chance), path)
        elif kind == "empty folder":
            path.mkdir()
        else:
            _deep(path, chance.choice((3, 50, 1500)))
    except (OSError, UnicodeEncodeError, shutil.SameFileError) as error:
        raise Unfit from error
    return f"{kind} {name[:40]!r} added"


def _deep(path: Path, depth: int) -> None:
    """Makes nested folders, deeper than the longest path reaches."""
    path.mkdir()
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=opened)
        inner = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=opened)
        os.close(opened)
        opened = inner
    os.close(opened)


def change_kind(folder: Path, chance: random.Random) -> str:
    """Replaces a file by a link, a folder, a pipe or a socket."""
    path = pick_file(folder, chance)
    data = path.read_bytes()
    aside = folder.parent / f"{folder.name}-aside"
    aside.mkdir(exist_ok=True)
    outside = aside / path.name
    outside.write_bytes(data)
    path.unlink()
    kinds = {
        "a link out of the folder": lambda: path.symlink_to(outside),
        "a link to a device": lambda: path.symlink_to("/dev/zero"),
        "a link to the environment": lambda: path.symlink_to("/proc/self/environ"),
        "a dangling link": lambda: path.symlink_to("nowhere"),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a hard link": lambda: os.link(outside, path),
        "a folder": lambda: path.mkdir(),
        "a pipe": lambda: os.mkfifo(path),
        "a socket": lambda: _bind(path),
    }
    kind = chance.choice(list(kinds))
    kinds[kind]()
    return f"{path.name}: {kind}"


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        opened = os.open(path.parent, os.O_RDONLY)  # an address may be no longer than 108 characters
        try:
            made.bind(f"/proc/self/fd/{opened}/{path.name}")
        except OSError as error:
            raise Unfit from error
        finally:
            os.close(opened)


def rename(folder: Path, chance: random.Random) -> str:
    """Renames a file, or exchanges the contents of two files."""
    path, other = pick_file(folder, chance), pick_file(folder, chance)
    if path == other:
        name = chance.choice(NAMES)
        if os.path.lexists(path.with_name(name)):
            raise Unfit
        path.rename(path.with_name(name))
        return f"{path.name} is called {name!r}"
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)
    return f"{path.name} and {other.name} exchanged"
