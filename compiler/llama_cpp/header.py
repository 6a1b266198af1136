"""Reads the header of a GGUF file: its keys and values, and the types, shapes and places of its tensors.

Nothing is believed: every count is checked against the file's size before memory is taken for it, so that a hostile
file ends in a sentence. We do not use the reader of the package gguf: it does not return on a file that promises an
array of 2^60 numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from struct import unpack
from typing import Any, BinaryIO

import numpy as np

from coldpress.compiler.llama_cpp.types import BLOCKS, NAMES
from coldpress.runtime.artifact.tensor_files import TensorEntry
from coldpress.schemas.errors import ColdpressError, clipped

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_NAME_BYTES = 1 << 16
MAX_TEXT_BYTES = 1 << 24
MAX_DIMENSIONS = 4
MAX_HEADER_BYTES = 256 << 20
"""The largest vocabularies in use take 12 MB."""
MAX_ALIGNMENT = 1 << 16
SCALARS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
"""GGUF's types that are neither texts nor arrays, by number."""
TEXT, ARRAY = 8, 9


@dataclass(frozen=True)
class Header:
    values: Mapping[str, Any]
    """By key: a number, truth value, text, list of texts, or array of numbers."""
    tensors: Mapping[str, TensorEntry]
    """By name, in the order of their bytes."""


class Bytes:
    """Reads a file from front to back and never beyond its end."""

    def __init__(self, file: BinaryIO, name: str, remedy: str, at_bytes: int = 0) -> None:
        """Starts at byte `at_bytes`; `remedy` ends every refusal of the file `name`."""
        self.name, self.remedy, self.at = name, remedy, at_bytes
        self.size_bytes = file.seek(0, 2)
        self._file = file
        file.seek(at_bytes)

    def refused(self, found: str) -> ColdpressError:
        return ColdpressError(f"{self.name}: {found}; {self.remedy}")

    def take(self, count: int) -> bytes:
        self._check(count)
        data = self._file.read(count)
        if len(data) != count:
            raise self.refused(f"it ends at byte {self.at + len(data)} while it is read")
        self.at += count
        return data

    def skip(self, count: int) -> None:
        self._check(count)
        self.at += count
        self._file.seek(self.at)

    def number(self, code: str) -> int:
        """Returns one little-endian whole number: i int32, I uint32, Q uint64."""
        return unpack(f"<{code}", self.take({"i": 4, "I": 4, "Q": 8}[code]))[0]

    def floats(self, count: int) -> np.ndarray:
        """Returns numbers float32 [count]."""
        return np.frombuffer(self.take(4 * count), "<f4").astype(np.float32)

    def text(self, code: str = "Q", most_bytes: int = MAX_NAME_BYTES) -> str:
        length = self.number(code)
        if not 0 <= length <= most_bytes:
            raise self.refused(f"a text of {length} bytes is promised at byte {self.at}, expected at most {most_bytes}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.refused(f"the text before byte {self.at} is not UTF-8") from error

    def _check(self, count: int) -> None:
        if not 0 <= count <= self.size_bytes - self.at:
            raise self.refused(
                f"{count} bytes are promised at byte {self.at} and the file has {self.size_bytes}: it is cut short, or "
                "something else"
            )


def read_header(file: BinaryIO, name: str, remedy: str = "download or convert it again") -> Header:
    """Reads the header of an open GGUF file. Raises ColdpressError naming the file, what was found and what was
    expected, OSError if the system refuses a read."""
    source = Bytes(file, name, remedy)
    if source.take(min(4, source.size_bytes)) != MAGIC:
        raise source.refused("it does not begin with GGUF")
    if (version := source.number("I")) not in VERSIONS:
        raise source.refused(f"it is GGUF of version {version}, expected 2 or 3, little-endian")
    num_tensors, num_keys = source.number("Q"), source.number("Q")
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise source.refused(
            f"it promises {num_tensors} tensors and {num_keys} keys, expected at most {MAX_TENSORS} and {MAX_KEYS}"
        )
    values: dict[str, Any] = {}
    for _ in range(num_keys):
        key = source.text()
        if key in values:
            raise source.refused(f"it has the key {clipped(key)} twice")
        values[key] = _value(source, key, source.number("I"))
        if source.at > MAX_HEADER_BYTES:
            raise source.refused(f"its keys take more than {MAX_HEADER_BYTES} bytes")
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise source.refused(f"general.alignment is {clipped(str(alignment))}, expected a power of two")
    described = [_tensor(source) for _ in range(num_tensors)]
    return Header(values, _placed(source, described, -(-source.at // alignment) * alignment, alignment))


def _value(source: Bytes, key: str, kind: int) -> Any:
    if kind == TEXT:
        return source.text("Q", MAX_TEXT_BYTES)
    if kind in SCALARS:
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(source.take(dtype.itemsize), dtype)[0].item()
    if kind != ARRAY:
        raise source.refused(f"the value of {clipped(key)} is of type {kind}, which GGUF does not have")
    kind, count = source.number("I"), source.number("Q")
    if kind in SCALARS:
        dtype = np.dtype(SCALARS[kind])
        if count * dtype.itemsize > MAX_HEADER_BYTES:
            raise source.refused(
                f"{count} values are promised by {clipped(key)}, expected at most {MAX_HEADER_BYTES} bytes"
            )
        return np.frombuffer(source.take(count * dtype.itemsize), dtype)
    if kind != TEXT:
        raise source.refused(f"{clipped(key)} is an array of type {kind}, expected one of numbers or texts")
    if count > (source.size_bytes - source.at) // 8:  # each has its length in front
        raise source.refused(f"{clipped(key)} promises {count} texts and the file has {source.size_bytes} bytes")
    return [source.text() for _ in range(count)]


def _tensor(source: Bytes) -> tuple[str, str, tuple[int, ...], int]:
    """Returns (name, type, shape, offset) of a tensor; GGUF has the shape's last dimension first."""
    name, dimensions = source.text(), source.number("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise source.refused(f"{clipped(name)} has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    shape = tuple(source.number("Q") for _ in range(dimensions))[::-1]
    kind, offset = source.number("I"), source.number("Q")
    if kind not in NAMES:
        raise source.refused(
            f"{clipped(name)} is of GGML's type {kind}, which cannot be read, expected one of {', '.join(BLOCKS)}"
        )
    if 0 in shape:
        raise source.refused(f"{clipped(name)} has the shape {list(shape)}, expected positive sizes")
    return name, NAMES[kind], shape, offset


def _placed(
    source: Bytes, described: list[tuple[str, str, tuple[int, ...], int]], data: int, alignment: int
) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for name, dtype, shape, offset in sorted(described, key=lambda tensor: tensor[3]):
        values, size_bytes = BLOCKS[dtype]
        if shape[-1] % values:
            raise source.refused(f"{clipped(name)} has rows of {shape[-1]} values, and {dtype} blocks of {values}")
        start = data + offset
        stop = start + math.prod(shape) // values * size_bytes
        if name in found or offset % alignment:
            what = "twice" if name in found else f"at byte {start}, expected a multiple of {alignment} from byte {data}"
            raise source.refused(f"it has the tensor {clipped(name)} {what}")
        if stop > source.size_bytes:
            raise source.refused(
                f"{clipped(name)} ends at byte {stop} and the file has {source.size_bytes}: it is cut short"
            )
        found[name] = TensorEntry(name, dtype, shape, start, stop)
    return found
