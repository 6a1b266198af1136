"""Reads the headers of a checkpoint's safetensors files and of the compiler's own array files.

Gives the one strict reader (runtime/artifact/tensor_header.py) its limits, and turns its refusals into errors about a
checkpoint.
"""

import functools
import os
import re
from pathlib import Path

from coldpress.runtime.artifact import tensor_header
from coldpress.runtime.artifact.strict_json import Limits
from coldpress.runtime.artifact.tensor_header import ITEM_BYTES, Rules, TensorEntry
from coldpress.schemas.errors import CheckpointError

RULES = Rules(
    dtypes=tuple(ITEM_BYTES),
    name=re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,511}"),
    name_words="letters, digits, '_', '-', '.'",
    rank=(0, 8),
    may_be_empty=True,
    max_metadata=1000,
    json=Limits(size_bytes=64 << 20, depth=8, integer=2**63 - 1, values=1 << 21, names=1 << 21),
)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of a safetensors file by name, in the order of their bytes.

    Raises:
        CheckpointError: naming the file, the tensor, what was found and what was expected.
    """
    try:
        status = path.stat()
        return _read_header(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror}); complete the checkpoint") from error


@functools.lru_cache(maxsize=256)
def _read_header(path: Path, size_bytes: int, changed_ns: int) -> dict[str, TensorEntry]:
    def refuse(field: str, found: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{path.name}: {field} is {found}, expected {expected}; copy or download the file again")

    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _, entries = tensor_header.read_header(opened, size_bytes, RULES, refuse)
    finally:
        os.close(opened)
    return {entry.name: entry for entry in entries}
