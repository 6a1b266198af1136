"""Reads the two formats of llama.cpp's importance matrices (tools/imatrix) and finds the tensors that they describe.

Both give the mean square of every input of each matrix, by the matrix's name in GGUF; experts follow one another. A
GGUF file holds sums of squares (`<name>.in_sum2`) and numbers of tokens (`<name>.counts`), one for each expert. The
older format is little-endian without a magic number, and holds means times a number of calls:

    int32 entries, then for each: int32 length, name, int32 calls, int32 values, float32 values

followed by the number of chunks and the text's name, both optional.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import numpy as np

from coldpress.compiler.llama_cpp.header import MAGIC, Bytes, read_header
from coldpress.runtime.artifact.tensor_files import TensorEntry
from coldpress.schemas.errors import ColdpressError, clipped

KIND = "imatrix"
SUMS, COUNTS = ".in_sum2", ".counts"
MAX_FILE_BYTES = 4 << 30
"""A mixture of 256 experts in 60 layers takes about 1 GB."""
MAX_ENTRIES = 1 << 16
MAX_EXPERTS = 1 << 12


@dataclass(frozen=True)
class Entry:
    """The place of a matrix, or of all experts' matrices, in the file. It holds no array: many entries may name the
    same bytes, so all of them together can be far larger than the file."""

    at_bytes: int
    num_values: int
    num_counts: int = 1
    counts_at_bytes: int | None = None
    """Place of the divisors, float32 [num_counts], one for each expert; None in the older format, which has `calls`."""
    calls: int = 1


@dataclass(frozen=True)
class Imatrix:
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
            values = Bytes(file, *_named(self.path), entry.at_bytes).floats(entry.num_values)
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
        return Bytes(file, *_named(self.path), entry.counts_at_bytes).floats(entry.num_counts)


def open_imatrix(path: Path) -> Imatrix:
    """Opens a file and finds its entries; reads no values.

    Raises:
        ColdpressError: if the file cannot be read or has neither format; the text is one sentence.
    """
    try:
        with path.open("rb") as file:
            source = Bytes(file, *_named(path))
            if source.size_bytes > MAX_FILE_BYTES:
                raise _refused(path, f"it has {source.size_bytes} bytes, expected {MAX_FILE_BYTES} at most")
            found = _gguf(file, source) if file.peek(len(MAGIC)).startswith(MAGIC) else _legacy(source)
    except OSError as error:
        raise ColdpressError(
            f"the imatrix {path} cannot be read ({error.strerror}); name the file that llama-imatrix wrote"
        ) from error
    if not found:
        raise _refused(path, "it has no entries, expected one for each matrix")
    return Imatrix(path, found)


def _named(path: Path) -> tuple[str, str]:
    return f"the imatrix {path}", "make it again with llama-imatrix"


def _refused(path: Path, what: str) -> ColdpressError:
    name, remedy = _named(path)
    return ColdpressError(f"{name}: {what}; {remedy}")


def _legacy(source: Bytes) -> dict[str, Entry]:
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


def _gguf(file: BinaryIO, source: Bytes) -> dict[str, Entry]:
    header = read_header(file, source.name, source.remedy)
    if (kind := header.values.get("general.type")) != KIND:
        raise source.refused(f"it is GGUF of the type {clipped(str(kind))}, expected {KIND}")
    for entry in header.tensors.values():
        if entry.dtype != "F32":
            raise source.refused(f"{clipped(entry.name)} is of the type {entry.dtype}, expected F32")
    return _matched(source, header.tensors)


def _matched(source: Bytes, tensors: Mapping[str, TensorEntry]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for name, sums in tensors.items():
        if not name.endswith(SUMS):
            continue
        matrix, count = name.removesuffix(SUMS), math.prod(sums.shape)
        counts = tensors.get(matrix + COUNTS)
        matrices = math.prod(counts.shape) if counts else 0
        if counts is None or not 0 < matrices <= MAX_EXPERTS or count % matrices:
            raise source.refused(
                f"{clipped(matrix)} has {count} sums and {matrices} counts, expected a count for each expert, at most "
                f"{MAX_EXPERTS}, and equally many sums for each"
            )
        found[matrix] = Entry(sums.start_bytes, count, matrices, counts.start_bytes)
    return found
