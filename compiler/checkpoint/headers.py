"""Reads the headers of a checkpoint's safetensors and GGUF files, and of the compiler's own array files.

Gives the one strict reader of safetensors (runtime/artifact/tensor_files.py) its limits, and turns refusals into
errors about a checkpoint. All that reads tensors asks here for their types, shapes and places, whatever the file.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from coldpress.compiler.llama_cpp import header
from coldpress.runtime.artifact import tensor_files
from coldpress.runtime.artifact.strict_json import Limits
from coldpress.runtime.artifact.tensor_files import ITEM_BYTES, Rules, TensorEntry
from coldpress.schemas.errors import CheckpointError, ColdpressError

Found = TypeVar("Found")
RULES = Rules(
    dtypes=tuple(ITEM_BYTES),
    name=re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,511}"),
    name_words="letters, digits, '_', '-', '.'",
    rank=(0, 8),
    may_be_empty=True,
    max_metadata=1000,
    json=Limits(size_bytes=64 << 20, depth=8, integer=2**63 - 1, values=1 << 21, names=1 << 21),
)


def read_header(path: Path) -> Mapping[str, TensorEntry]:
    """Returns a safetensors or GGUF file's tensors by name, in the order of their bytes; raises CheckpointError."""
    return _cached(_read_header, path)


def is_gguf(path: Path) -> bool:
    """Tells whether a file begins as GGUF does, which no safetensors file can; raises OSError."""
    with path.open("rb") as file:
        return file.read(len(header.MAGIC)) == header.MAGIC


def read_gguf(path: Path) -> header.Header:
    return _cached(_read_gguf, path)


def _cached(read: Callable[[Path, int, int], Found], path: Path) -> Found:
    try:
        status = path.stat()
        return read(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror}); complete the checkpoint") from error


@functools.lru_cache(maxsize=4)
def _read_gguf(path: Path, size_bytes: int, changed_ns: int) -> header.Header:
    try:
        with path.open("rb") as file:
            return header.read_header(file, path.name)
    except ColdpressError as error:
        raise CheckpointError(str(error)) from error


@functools.lru_cache(maxsize=256)
def _read_header(path: Path, size_bytes: int, changed_ns: int) -> Mapping[str, TensorEntry]:
    if is_gguf(path):
        return _read_gguf(path, size_bytes, changed_ns).tensors

    def refuse(field: str, found: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{path.name}: {field} is {found}, expected {expected}; copy or download the file again")

    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _, entries = tensor_files.read_entries(opened, size_bytes, RULES, refuse)
    finally:
        os.close(opened)
    return {entry.name: entry for entry in entries}
