"""Edits safetensors files: the header, its length, and values at the offsets that the header gives."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from tools.fuzz.file_edits import files
from tools.fuzz.json_edits import Unfit, dump, edit_text, edit_value, pick

NUMPY = {
    **{"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8", "U8": "u1", "I8": "i1"},
    **{"I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"},
}
SPECIAL_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-8, 65504.0, 1e5, 3.0e38, -3.0e38, np.inf, -np.inf, np.nan)
SPECIAL_INTEGERS = (0, 1, -1, 2, 255, 2**31 - 1, -(2**31), 10**6)


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns (header, data) of a file; raises Unfit if it is not a safetensors file any more."""
    try:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
    except (OSError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise Unfit from error
    if not isinstance(header, dict) or not header:
        raise Unfit
    return header, data[8 + length :]


def join(path: Path, text: bytes, data: bytes) -> None:
    """Writes a file with the text of a header and with data."""
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _tensors(folder: Path, chance: random.Random) -> Path:
    found = [path for path in files(folder) if path.suffix == ".safetensors"]
    if not found:
        raise Unfit
    return chance.choice(found)


def header_value(folder: Path, chance: random.Random) -> str:
    """Edits types, shapes, offsets, names or metadata in a header."""
    path = _tensors(folder, chance)
    header, data = split(path)
    if chance.random() < 0.2:
        header["__metadata__"] = {f"k{number}": "v" for number in range(chance.choice((1, 2, 5000)))}
    done = edit_value(header, chance)
    join(path, dump(header), data)
    return f"{path.name}, header: {done}"


def header_text(folder: Path, chance: random.Random) -> str:
    """Edits a header's text or length."""
    path = _tensors(folder, chance)
    header, data = split(path)
    text = dump(header)
    if chance.random() < 0.5:
        text, done = edit_text(text, chance)
        join(path, text, data)
        return f"{path.name}, header's text: {done}"
    length = chance.choice((0, 1, 2, len(text) - 1, len(text) + 1, len(text) + len(data), 2**31, 2**63, 2**64 - 1))
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return f"{path.name}: header of {length} bytes instead of {len(text)}"


def header_move(folder: Path, chance: random.Random) -> str:
    """Moves a tensor or exchanges two, so that tensors overlap, leave a hole or have other shapes."""
    path = _tensors(folder, chance)
    header, data = split(path)
    names = [name for name, entry in header.items() if isinstance(entry, dict) and "data_offsets" in entry]
    if not names:
        raise Unfit
    name, other = chance.choice(names), chance.choice(names)
    try:
        start, stop = header[name]["data_offsets"]
        shift = chance.choice((-8, -4, 4, 8, 4096))
        if chance.random() < 0.4:
            header[name]["data_offsets"], done = header[other]["data_offsets"], f"lies where {other} is"
        elif chance.random() < 0.5:
            header[name]["data_offsets"], done = [start + shift, stop + shift], f"moved by {shift}"
        else:
            header[name], header[other] = header[other], header[name]
            done = f"exchanged with {other}"
    except (TypeError, ValueError, KeyError) as error:
        raise Unfit from error
    join(path, dump(header), data)
    return f"{path.name}: {name} {done}"


def values(folder: Path, chance: random.Random, name: str | None = None) -> str:
    """Changes numbers of a random tensor, or of the tensor `name`."""
    path = _tensors(folder, chance)
    header, data = split(path)
    names = [key for key in header if key != "__metadata__"] if name is None else [name]
    name = chance.choice(names)
    try:
        dtype, (start, stop) = NUMPY[header[name]["dtype"]], header[name]["data_offsets"]
        array = np.frombuffer(data[start:stop], dtype).copy()
    except (TypeError, ValueError, KeyError) as error:
        raise Unfit from error
    if not array.size:
        raise Unfit
    done = _edit_array(array, header[name]["dtype"], chance)
    whole = path.read_bytes()
    before = whole[: len(whole) - len(data) + start]  # the header stays as it was written
    path.write_bytes(before + array.tobytes() + data[stop:])
    return f"{path.name}: {name} {done}"


def _edit_array(array: np.ndarray, code: str, chance: random.Random) -> str:
    index, other = chance.randrange(array.size), chance.randrange(array.size)
    how = chance.choice(("one", "one", "all", "exchanged", "doubled", "reversed", "scaled"))
    if how in ("one", "all"):
        value = _special(array, code, chance)
        array[index if how == "one" else slice(None)] = value
        return f"[{index if how == 'one' else ':'}] = {value}"
    if how == "exchanged":
        array[[index, other]] = array[[other, index]]
        return f"[{index}] and [{other}] exchanged"
    if how == "doubled":
        array[index] = array[other]
        return f"[{index}] = [{other}]"
    if how == "reversed":
        array[:] = array[::-1].copy()
        return "reversed"
    factor = chance.choice((0, 2, 1000))
    with np.errstate(all="ignore"):
        array *= array.dtype.type(min(factor, 100) if array.dtype.itemsize == 1 else factor)
    return f"times {factor}"


def _special(array: np.ndarray, code: str, chance: random.Random) -> Any:
    if code == "BF16":
        return array.dtype.type(chance.choice((0, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0x0001)))
    with np.errstate(all="ignore"):
        if array.dtype.kind == "f":
            return np.float64(chance.choice(SPECIAL_FLOATS)).astype(array.dtype)
        return np.array(chance.choice((*SPECIAL_INTEGERS, array.size, array.size - 1))).astype(array.dtype)


def rename_tensor(folder: Path, chance: random.Random) -> str:
    """Renames a tensor."""
    path = _tensors(folder, chance)
    header, data = split(path)
    (old, *_) = pick(header, chance)
    new = chance.choice(("x", "", "a..b", "../x", "x" * 600, "\x1b[2J", "é", f"{old}.weight", old.replace("0", "1")))
    renamed = {new if name == old else name: entry for name, entry in header.items()}
    join(path, dump(renamed), data)
    return f"{path.name}: {old} is called {new[:40]!r}"
