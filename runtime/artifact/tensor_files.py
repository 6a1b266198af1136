"""safetensors files, read strictly: what the library lets pass (duplicate keys, any name, any field) is refused.

The header is parsed and every bound checked against the real file size before a byte of data is allocated. Tensors are
read in file order, so that the file's digest comes from the same pass.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.artifact import strict_json
from runtime.artifact.errors import DigestError, TensorFileError, short
from runtime.artifact.safe_files import read_exactly

MAX_HEADER_BYTES = 16 << 20
MAX_DIMENSIONS = 4
NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+){0,15}")
MAX_NAME = 200
DTYPES: Mapping[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U32": np.dtype("<u4"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in its file; `offset` counts from the file's first byte."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFile:
    """A checked header: the tensors in file order, and the bytes before the first of them."""

    file: str
    size_bytes: int
    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def check_contents(self, expected: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], exact: bool) -> None:
        """Refuses a file that lacks one of `expected` (name to dtype and shape), or, if `exact`, has another one."""
        present = {tensor.name: (tensor.dtype, tensor.shape) for tensor in self.tensors}
        for name, (dtype, shape) in expected.items():
            wanted = f"{np.dtype(dtype).name} {list(shape)}"
            if name not in present:
                raise TensorFileError(self.file, f"tensor {short(name)}", "missing", wanted)
            if present[name] != (dtype, shape):
                found = f"{present[name][0].name} {list(present[name][1])}"
                raise TensorFileError(self.file, f"tensor {short(name)}", found, wanted)
        extra = sorted(present.keys() - expected.keys())
        if extra and exact:
            raise TensorFileError(self.file, f"tensor {short(extra[0])}", "present", "only what the manifest names")


def read_header(opened: int, file: str, size_bytes: int) -> TensorFile:
    """Parses and checks the header of an open file of `size_bytes`.

    Raises:
        TensorFileError, JsonError: naming what is wrong.
    """
    if size_bytes < 8:
        raise TensorFileError(file, "the size", f"{size_bytes} bytes", "at least 8")
    prefix = bytearray(8)
    read_exactly(opened, file, memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_BYTES, size_bytes - 8)
    if not 2 <= length <= limit:
        raise TensorFileError(file, "the header length", str(length), f"from 2 to {limit}")
    header = bytearray(length)
    read_exactly(opened, file, memoryview(header), 8)
    if header[:1] != b"{":
        raise TensorFileError(file, "the header's first byte", short(bytes(header[:1])), "'{'")
    entries = strict_json.parse(bytes(header), file, "the header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or len(metadata) > 1 or not all(isinstance(v, str) for v in metadata.values()):
        raise TensorFileError(file, "__metadata__", short(metadata), "an object of at most one text")
    tensors = [_tensor(file, name, entry, 8 + length) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_packed(file, tensors, 8 + length, size_bytes)
    return TensorFile(file, size_bytes, bytes(prefix + header), tuple(tensors))


def _tensor(file: str, name: str, entry: Any, data_start: int) -> Tensor:
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise TensorFileError(file, "a tensor's name", short(name), "words of letters, digits and '_' joined by '.'")
    field = f"tensor {short(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(file, field, short(entry), "an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise TensorFileError(file, f"{field}.dtype", short(dtype), f"one of {', '.join(DTYPES)}")
    if not _are_counts(shape) or not 1 <= len(shape) <= MAX_DIMENSIONS or 0 in shape:
        raise TensorFileError(file, f"{field}.shape", short(shape), f"1 to {MAX_DIMENSIONS} positive integers")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise TensorFileError(file, f"{field}.data_offsets", short(offsets), "two counts")
    tensor = Tensor(name, DTYPES[dtype], tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != tensor.num_bytes:
        raise TensorFileError(file, f"{field}.data_offsets", short(offsets), f"{tensor.num_bytes} bytes apart")
    return tensor


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_packed(file: str, tensors: list[Tensor], data_start: int, size_bytes: int) -> None:
    """No holes, no overlaps, nothing behind the last tensor."""
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            field = f"tensor {short(tensor.name)}.data_offsets[0]"
            raise TensorFileError(file, field, str(tensor.offset - data_start), str(end - data_start))
        end += tensor.num_bytes
    if end != size_bytes:
        raise TensorFileError(file, "the size", f"{size_bytes} bytes", f"{end}, where the last tensor ends")


def read_arrays(opened: int, layout: TensorFile) -> tuple[dict[str, np.ndarray], str]:
    """All tensors as arrays of their own, and the sha256 of the whole file, from one pass."""
    digest = hashlib.sha256(layout.header)
    arrays: dict[str, np.ndarray] = {}
    for tensor in layout.tensors:
        array = np.empty(tensor.shape, tensor.dtype)
        view = array.data.cast("B")
        read_exactly(opened, layout.file, view, tensor.offset)
        digest.update(view)
        arrays[tensor.name] = array
    return arrays, digest.hexdigest()


def load(opened: int, layout: TensorFile, sha256: str) -> dict[str, np.ndarray]:
    """All tensors as arrays of their own.

    Raises:
        DigestError: if the file's content is not what the manifest says.
    """
    arrays, found = read_arrays(opened, layout)
    if found != sha256:
        raise DigestError(layout.file, "the sha256", found, f"{sha256}, as the manifest says")
    return arrays
