"""Reads safetensors files strictly, for artifacts and for checkpoints, and writes their headers.

A file is: 8 bytes length n, n bytes of JSON, data. The tensors must tile the data exactly, in any order: no hole, no
overlap, nothing behind them. Names must be plain, keys distinct, sizes equal shape times dtype (the format's README;
libraries accept more). The header is parsed and every bound checked against the file's real size before a byte of data
is allocated. An artifact's tensors are read in file order, so that the same pass computes the file's digest.
"""

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import DAMAGED, DigestError, TensorFileError, short
from coldpress.runtime.artifact.safe_files import read_exactly, telling
from coldpress.schemas.errors import ColdpressError

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""The format's code of a type -> bytes of one value."""
CODES = {
    **{"int64": "I64", "float64": "F64", "float32": "F32", "uint32": "U32", "int32": "I32"},
    **{"float16": "F16", "uint16": "U16", "uint8": "U8"},
}
"""numpy's dtypes -> codes, in the order in which the safetensors library lays out arrays."""
NUMPY_NAMES = {code: name for name, code in CODES.items()}
PORTION_BYTES = 256 << 10
"""Bytes of a file that are read at a time. The page cache holds the next portions, two at most, besides."""

Refuse = Callable[[str, str, str], ColdpressError]
"""(field, found, expected) -> the error to raise."""


@dataclass(frozen=True)
class Rules:
    dtypes: tuple[str, ...]
    """Codes of `ITEM_BYTES`."""
    name: re.Pattern[str]
    name_words: str
    """A description of the names that `name` matches, for errors."""
    rank: tuple[int, int]
    """Least and largest number of dimensions."""
    may_be_empty: bool
    """True if a dimension may be 0."""
    max_metadata: int
    """Most entries of `__metadata__`."""
    json: strict_json.Limits


RULES = Rules(
    dtypes=("U8", "I32", "I64", "U32", "F16", "F32"),
    name=re.compile(r"(?=.{1,200}$)[A-Za-z0-9_]+(\.[A-Za-z0-9_]+){0,15}"),
    name_words="words of letters, digits and '_' joined by '.'",
    rank=(1, 4),
    may_be_empty=False,
    max_metadata=1,
    json=strict_json.ARTIFACT,
)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: the code of its type, its shape, and the range of its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start_bytes: int
    stop_bytes: int


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Makes the header of tensors, each (name, numpy's dtype, shape), that follow each other without gaps. Returns the
    file's bytes before the first tensor, and name -> entry."""
    header: dict[str, object] = {}
    placed: list[TensorEntry] = []
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[CODES[dtype]]
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        placed.append(TensorEntry(name, CODES[dtype], shape, start, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8 bytes, as in files of the library
    base = 8 + len(text)
    entries = {
        entry.name: replace(entry, start_bytes=base + entry.start_bytes, stop_bytes=base + entry.stop_bytes)
        for entry in placed
    }
    return len(text).to_bytes(8, "little") + text, entries


def read_entries(opened: int, size_bytes: int, rules: Rules, refuse: Refuse) -> tuple[bytes, tuple[TensorEntry, ...]]:
    """Reads and checks a header; returns the bytes before the first tensor, and the tensors in the order of bytes.
    Raises what `refuse` makes if the header breaks a rule, `OSError` if the system refuses a read."""
    prefix = os.pread(opened, 8, 0)
    if len(prefix) < 8:
        raise refuse("the size", f"{size_bytes} bytes", "at least 8, a safetensors file")
    length = int.from_bytes(prefix, "little")
    limit = min(rules.json.size_bytes, size_bytes - 8)
    if not 2 <= length <= limit:
        raise refuse("the header length", str(length), f"from 2 to {limit} in a file of {size_bytes} bytes")
    header = os.pread(opened, length, 8)
    if len(header) < length or header[:1] != b"{":
        raise refuse("the header's first byte", short(header[:1]), "'{' and what follows it")
    values = strict_json.parse(header, lambda found, expected: refuse("the header", found, expected), rules.json)
    metadata = values.pop("__metadata__", {})
    is_map = strict_json.is_object(metadata) and all(isinstance(value, str) for value in metadata.values())
    if not is_map or len(metadata) > rules.max_metadata:
        raise refuse("__metadata__", short(metadata), f"an object of texts, at most {rules.max_metadata}")
    entries = [_entry(name, value, 8 + length, rules, refuse) for name, value in values.items()]
    entries.sort(key=lambda entry: (entry.start_bytes, entry.stop_bytes))
    _check_tiling(entries, 8 + length, size_bytes, refuse)
    return prefix + header, tuple(entries)


def _entry(name: str, value: Any, data_start: int, rules: Rules, refuse: Refuse) -> TensorEntry:
    if not rules.name.fullmatch(name) or ".." in name:
        raise refuse("a tensor's name", short(name), rules.name_words)
    field = f"tensor {name}"
    if not strict_json.is_object(value) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse(field, short(value), "an object of dtype, shape and data_offsets alone")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in rules.dtypes:
        raise refuse(f"{field}.dtype", short(dtype), f"one of {', '.join(rules.dtypes)}")
    least, most = rules.rank
    if not _are_counts(shape) or not least <= len(shape) <= most or (0 in shape and not rules.may_be_empty):
        sizes = "counts" if rules.may_be_empty else "positive integers"
        raise refuse(f"{field}.shape", short(shape), f"{least} to {most} {sizes}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise refuse(f"{field}.data_offsets", short(offsets), "two counts")
    start, stop = offsets
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if stop - start != num_bytes:
        raise refuse(f"{field}.data_offsets", short(offsets), f"{num_bytes} bytes apart for {dtype} {shape}")
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + stop)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return strict_json.is_array(values) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_tiling(entries: list[TensorEntry], data_start: int, size_bytes: int, refuse: Refuse) -> None:
    end = data_start
    for entry in entries:
        field = f"tensor {entry.name}"
        if entry.start_bytes < end:
            raise refuse(field, f"overlapping the one before it by {end - entry.start_bytes} bytes", "disjoint tensors")
        if entry.start_bytes > end:
            raise refuse(field, f"behind a hole of {entry.start_bytes - end} bytes", "tensors without gaps")
        end = entry.stop_bytes
    if end != size_bytes:
        raise refuse("the size", f"{size_bytes} bytes", f"{end}, where the last tensor ends")


@dataclass(frozen=True)
class TensorFile:
    """A checked header: the tensors in file order, and the bytes before the first of them."""

    file: str
    header: bytes
    tensors: tuple[TensorEntry, ...]
    remedy: str
    """Ends the errors about this file."""

    def check_contents(self, expected: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], exact: bool) -> None:
        """Refuses a file that lacks a tensor of `expected` (name -> dtype and shape) or, if `exact`, has any other."""
        present = {tensor.name: (numpy_dtype(tensor), tensor.shape) for tensor in self.tensors}
        for name, (dtype, shape) in expected.items():
            wanted = f"{np.dtype(dtype).name} {list(shape)}"
            if name not in present:
                raise TensorFileError(self.file, f"tensor {short(name)}", "missing", wanted, self.remedy)
            if present[name] != (dtype, shape):
                found = f"{present[name][0].name} {list(present[name][1])}"
                raise TensorFileError(self.file, f"tensor {short(name)}", found, wanted, self.remedy)
        extra = sorted(present.keys() - expected.keys())
        if extra and exact:
            expected_words = "only what the manifest names"
            raise TensorFileError(self.file, f"tensor {short(extra[0])}", "present", expected_words, self.remedy)


def read_header(opened: int, file: str, size_bytes: int, remedy: str = DAMAGED) -> TensorFile:
    """Parses and checks the header of an open file of `size_bytes`; `remedy` ends the errors about it. Raises
    `TensorFileError` naming what is wrong, `DeviceError` if the device fails."""
    refuse = functools.partial(TensorFileError, file, remedy=remedy)
    with telling(file, "a read"):
        return TensorFile(file, *read_entries(opened, size_bytes, RULES, refuse), remedy)


def numpy_dtype(tensor: TensorEntry) -> np.dtype[Any]:
    return np.dtype(NUMPY_NAMES[tensor.dtype]).newbyteorder("<")


def load(opened: int, layout: TensorFile, sha256: str | None = None) -> dict[str, np.ndarray]:
    """Reads all tensors as separate arrays. Raises `DigestError` if the file's sha256 is not the given one.

    The kernel reads one portion ahead and drops a file's pages as soon as they are read: its page cache would hold the
    same bytes once more, outside the DRAM budget.
    """
    digest = hashlib.sha256(layout.header)
    arrays: dict[str, np.ndarray] = {}
    ahead = len(layout.header)  # the kernel has been asked for the bytes before it
    for tensor in layout.tensors:
        array = np.empty(tensor.shape, numpy_dtype(tensor))
        view = array.data.cast("B")
        for start in range(0, len(view), PORTION_BYTES):
            portion = view[start : start + PORTION_BYTES]
            while ahead <= tensor.start_bytes + start + PORTION_BYTES:
                os.posix_fadvise(opened, ahead, PORTION_BYTES, os.POSIX_FADV_WILLNEED)
                ahead += PORTION_BYTES
            read_exactly(opened, layout.file, portion, tensor.start_bytes + start)
            digest.update(portion)
            os.posix_fadvise(opened, 0, tensor.start_bytes + start + len(portion), os.POSIX_FADV_DONTNEED)
        arrays[tensor.name] = array
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel may have read beyond the last tensor
    if sha256 not in (None, digest.hexdigest()):
        raise DigestError(layout.file, "the sha256", digest.hexdigest(), f"{sha256}, as the manifest says")
    return arrays
