"""Reads an artifact's safetensors files strictly: refuses duplicate keys, odd names and unknown fields, which the
library accepts.

The header is parsed and every bound checked against the real file size before a byte of data is allocated. Tensors are
read in file order, so that the same pass computes the file's digest.
"""

import functools
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coldpress.runtime.artifact import strict_json, tensor_header
from coldpress.runtime.artifact.errors import DAMAGED, DigestError, TensorFileError, short
from coldpress.runtime.artifact.safe_files import read_exactly, telling
from coldpress.runtime.artifact.tensor_header import NUMPY_NAMES, Rules, TensorEntry

RULES = Rules(
    dtypes=("U8", "I32", "I64", "U32", "F16", "F32"),
    name=re.compile(r"(?=.{1,200}$)[A-Za-z0-9_]+(\.[A-Za-z0-9_]+){0,15}"),
    name_words="words of letters, digits and '_' joined by '.'",
    rank=(1, 4),
    may_be_empty=False,
    max_metadata=1,
    json=strict_json.ARTIFACT,
)


PORTION_BYTES = 256 << 10
"""Bytes of a file that are read at a time. The page cache holds the next portions, two at most, besides."""


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
    """Parses and checks the header of an open file of `size_bytes`; `remedy` ends the errors about it.

    Raises:
        TensorFileError: naming what is wrong.
        DeviceError: if the device fails.
    """
    refuse = functools.partial(TensorFileError, file, remedy=remedy)
    with telling(file, "a read"):
        return TensorFile(file, *tensor_header.read_header(opened, size_bytes, RULES, refuse), remedy)


def numpy_dtype(tensor: TensorEntry) -> np.dtype[Any]:
    return np.dtype(NUMPY_NAMES[tensor.dtype]).newbyteorder("<")


def read_arrays(opened: int, layout: TensorFile) -> tuple[dict[str, np.ndarray], str]:
    """Reads all tensors as separate arrays, and computes the sha256 of the whole file, in one pass.

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
    return arrays, digest.hexdigest()


def load(opened: int, layout: TensorFile, sha256: str) -> dict[str, np.ndarray]:
    """Reads all tensors as separate arrays.

    Raises:
        DigestError: if the file's content is not what the manifest says.
    """
    arrays, found = read_arrays(opened, layout)
    if found != sha256:
        raise DigestError(layout.file, "the sha256", found, f"{sha256}, as the manifest says")
    return arrays
