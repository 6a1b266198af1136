"""Reads the two formats of llama.cpp's importance matrices (tools/imatrix) and finds the tensors that they describe.

Both give the mean square of every input of each matrix, by the matrix's name in GGUF; experts follow one another. A
GGUF file holds sums of squares (`<name>.in_sum2`) and numbers of tokens (`<name>.counts`), one for each expert. The
older format is little-endian without a magic number, and holds means times a number of calls:

    int32 entries, then for each: int32 length, name, int32 calls, int32 values, float32 values

followed by the number of chunks and the text's name, both optional. We do not use the package gguf: its reader does not
return on a file that promises an array of 2^60 numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from struct import unpack

import numpy as np

from coldpress.schemas.errors import ColdpressError, clipped

MAGIC = b"GGUF"
VERSIONS = (2, 3)
KIND = "imatrix"
SUMS, COUNTS = ".in_sum2", ".counts"
MAX_FILE_BYTES = 4 << 30
"""A mixture of 256 experts in 60 layers takes about 1 GB."""
MAX_ENTRIES = 1 << 16
MAX_EXPERTS = 1 << 12
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4
FLOAT32 = 0
"""GGML's type number of float32."""
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of GGUF's metadata types that are neither texts nor arrays, by type number."""
UINT32, TEXT, ARRAY = 4, 8, 9


@dataclass(frozen=True)
class Entry:
    """The place of a matrix, or of all experts' matrices, in the file.

    It holds no array: many entries may name the same bytes, so all of them together can be far larger than the file.
    """

    at_bytes: int
    num_values: int
    num_counts: int = 1
    counts_at_bytes: int | None = None
    """Place of the divisors, float32 [num_counts], one for each expert; None in the older format, which has `calls`."""
    calls: int = 1


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix on disk."""

    path: Path
    entries: Mapping[str, Entry]

    def read(self, name: str) -> np.ndarray:
        """Returns mean squares float32 [inputs], experts one after another; 1 for an expert that no token used, as in
        llama.cpp.

        Raises:
            ColdpressError: if a count or a mean is not a finite number that is at least 0.
        """
        entry = self.entries[name]
        with self.path.open("rb") as file:
            values = _Bytes(file, self.path, entry.at_bytes).floats(entry.num_values)
            counts = self._counts(file, entry)[:, None]
        if not (np.isfinite(counts) & (counts >= 0)).all():
            raise _refused(self.path, f"the counts of {clipped(name)} are not valid numbers of tokens")
        with np.errstate(over="ignore", invalid="ignore"):
            means = np.where(counts > 0, values.reshape(len(counts), -1) / np.maximum(counts, 1), np.float32(1))
        if not (np.isfinite(means) & (means >= 0)).all():
            what = f"{clipped(name)} holds NaN, infinity or a number below 0, expected mean squares"
            raise _refused(self.path, what)
        return means.reshape(-1)

    def _counts(self, file: BufferedReader, entry: Entry) -> np.ndarray:
        """Returns the divisors of an entry, float32 [num_counts]; 0 for an expert that was never used."""
        if entry.counts_at_bytes is None:
            return np.full(entry.num_counts, entry.calls, np.float32)
        return _Bytes(file, self.path, entry.counts_at_bytes).floats(entry.num_counts)


def open_imatrix(path: Path) -> Imatrix:
    """Opens a file and finds its entries; reads no values.

    Raises:
        ColdpressError: if the file cannot be read or has neither format; the text is one sentence.
    """
    try:
        with path.open("rb") as file:
            source = _Bytes(file, path)
            if source.size_bytes > MAX_FILE_BYTES:
                raise _refused(path, f"it has {source.size_bytes} bytes, expected {MAX_FILE_BYTES} at most")
            found = _gguf(source) if file.peek(len(MAGIC)).startswith(MAGIC) else _legacy(source)
    except OSError as error:
        raise ColdpressError(
            f"the imatrix {path} cannot be read ({error.strerror}); name the file that llama-imatrix wrote"
        ) from error
    if not found:
        raise _refused(path, "it has no entries, expected one for each matrix")
    return Imatrix(path, found)


def _refused(path: Path, what: str) -> ColdpressError:
    return ColdpressError(f"the imatrix {path}: {what}; make it again with llama-imatrix")


class _Bytes:
    """Reads a file from front to back and never beyond its end."""

    def __init__(self, file: BufferedReader, path: Path, at_bytes: int = 0) -> None:
        self.path, self.at = path, at_bytes
        self.size_bytes = file.seek(0, 2)
        self._file = file
        file.seek(at_bytes)

    def refused(self, what: str) -> ColdpressError:
        return _refused(self.path, what)

    def take(self, count: int) -> bytes:
        """Returns the next bytes."""
        self._check(count)
        data = self._file.read(count)
        if len(data) != count:
            raise self.refused(f"it ends at byte {self.at + len(data)} while it is read")
        self.at += count
        return data

    def skip(self, count: int) -> None:
        """Skips bytes."""
        self._check(count)
        self.at += count
        self._file.seek(self.at)

    def number(self, code: str) -> int:
        """Returns one little-endian whole number: i int32, I uint32, Q uint64."""
        return unpack(f"<{code}", self.take({"i": 4, "I": 4, "Q": 8}[code]))[0]

    def floats(self, count: int) -> np.ndarray:
        return np.frombuffer(self.take(4 * count), "<f4").astype(np.float32)

    def text(self, code: str) -> str:
        """Returns a text that follows its length."""
        length = self.number(code)
        if not 0 <= length <= MAX_NAME_BYTES:
            raise self.refused(f"a text of {length} bytes is promised at byte {self.at}, expected names")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.refused(f"the text before byte {self.at} is not UTF-8") from error

    def _check(self, count: int) -> None:
        if count > self.size_bytes - self.at:
            raise self.refused(
                f"{count} bytes are promised at byte {self.at} and the file has {self.size_bytes}: it is cut short, or "
                "no importance matrix"
            )


def _legacy(source: _Bytes) -> dict[str, Entry]:
    """Returns the entries of the older format; the bytes after them do not describe the model."""
    count = source.number("i")
    if not 0 < count <= MAX_ENTRIES:
        raise source.refused("it is neither GGUF nor llama.cpp's older form, which begins with the number of entries")
    found: dict[str, Entry] = {}
    for _ in range(count):
        name = source.text("i")
        calls, values = source.number("i"), source.number("i")
        if calls < 0 or values < 1 or name in found:
            raise source.refused(
                f"entry {clipped(name)} has {calls} calls and {values} values, expected one such entry with values"
            )
        found[name] = Entry(source.at, values, calls=max(calls, 1))
        source.skip(4 * values)
    return found


def _gguf(source: _Bytes) -> dict[str, Entry]:
    source.take(len(MAGIC))
    if (version := source.number("I")) not in VERSIONS:
        raise source.refused(f"it is GGUF of version {version}, expected 2 or 3, little-endian")
    num_tensors, num_keys = source.number("Q"), source.number("Q")
    if not max(num_tensors, num_keys) <= 4 * MAX_ENTRIES:
        raise source.refused(f"it promises {num_tensors} tensors and {num_keys} keys, expected {4 * MAX_ENTRIES}")
    metadata = dict(_pair(source) for _ in range(num_keys))
    if (kind := metadata.get("general.type")) != KIND:
        raise source.refused(f"it is GGUF of the type {clipped(str(kind))}, expected {KIND}")
    tensors: dict[str, tuple[int, int]] = {}
    for _ in range(num_tensors):
        name, *described = _tensor(source)
        if name in tensors:
            raise source.refused(f"it has two tensors {clipped(name)}, expected one")
        tensors[name] = (described[0], described[1])
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise source.refused(f"its alignment is {alignment}, expected at least 1")
    return _matched(source, tensors, -(-source.at // alignment) * alignment)


def _matched(source: _Bytes, tensors: Mapping[str, tuple[int, int]], data: int) -> dict[str, Entry]:
    """Matches sums with their counts, given each tensor's number of values and its offset from byte `data`."""
    found: dict[str, Entry] = {}
    for name, (count, offset) in tensors.items():
        if data + offset + 4 * count > source.size_bytes:
            raise source.refused(
                f"{clipped(name)} ends at byte {data + offset + 4 * count} and the file has {source.size_bytes}: it is "
                "cut short"
            )
        if not name.endswith(SUMS):
            continue
        matrix = name.removesuffix(SUMS)
        matrices, at = tensors.get(matrix + COUNTS, (0, 0))
        if not 0 < matrices <= MAX_EXPERTS or count < 1 or count % matrices:
            raise source.refused(
                f"{clipped(matrix)} has {count} sums and {matrices} counts, expected a count for each expert, at most "
                f"{MAX_EXPERTS}, and equally many sums for each"
            )
        found[matrix] = Entry(data + offset, count, matrices, data + at)
    return found


def _pair(source: _Bytes) -> tuple[str, object]:
    """Returns a key of the metadata, with its value if that is a text or a uint32; else with None."""
    key, kind = source.text("Q"), source.number("I")
    if kind == TEXT:
        return key, source.text("Q")
    if kind == UINT32:
        return key, source.number("I")
    if kind == ARRAY:
        kind, count = source.number("I"), source.number("Q")
        if kind == TEXT:
            if count > MAX_ENTRIES:
                raise source.refused(f"{clipped(key)} promises {count} texts, expected {MAX_ENTRIES} at most")
            for _ in range(count):
                source.text("Q")
            return key, None
    else:
        count = 1
    if kind not in SCALAR_BYTES:
        raise source.refused(f"the value of {clipped(key)} is of type {kind}, which GGUF does not have")
    source.skip(SCALAR_BYTES[kind] * count)
    return key, None


def _tensor(source: _Bytes) -> tuple[str, int, int]:
    """Returns (name, number of values, offset in bytes) of a tensor."""
    name, dimensions = source.text("Q"), source.number("I")
    if dimensions > MAX_DIMENSIONS:
        raise source.refused(f"{clipped(name)} has {dimensions} dimensions, expected {MAX_DIMENSIONS} at most")
    count = math.prod(source.number("Q") for _ in range(dimensions))
    kind, offset = source.number("I"), source.number("Q")
    if kind != FLOAT32:
        raise source.refused(f"{clipped(name)} is of GGML's type {kind}, expected {FLOAT32}, float32")
    return name, count, offset
