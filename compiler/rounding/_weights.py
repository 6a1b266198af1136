"""Defines a rounding algorithm and its input: a matrix as stored slices, read a block at a time. An algorithm is a file
of this package whose class `Plugin` extends `Algorithm`."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from coldpress.compiler.checkpoint.tensors import codes_type, read_codes, read_rows
from coldpress.runtime.plugins import PluginBase, load
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName
from coldpress.schemas.model import Model

BLOCK_BYTES = 8 << 20
"""float32 bytes that are read, transposed and encoded at a time."""
BAND_ROWS = 16
"""Rows that are transposed at a time: a band writes whole cache lines and stays in the cache; 7 times faster."""

Axis = Literal["row", "column"]
Read = Callable[[int, int], np.ndarray]
"""(start, stop) -> the slices from start to stop, float32 [stop - start, length]."""


@dataclass(frozen=True)
class Weights:
    """`count` slices of `length` values: rows or columns of a matrix."""

    count: int
    length: int
    axis: Axis
    read: Read
    gram: np.ndarray | None = None
    """Gram matrix of the matrix's inputs, float32 [n, n] with n its columns; None where not asked for or unknown."""
    importance: np.ndarray | None = None
    """Mean square of each of the matrix's inputs, float32 [n]; None where not asked for or unknown."""
    codes: Callable[[FormatName], np.ndarray | None] = lambda _: None
    """Format -> the source's own codes uint8 [n, nbytes(length)], if it has these slices in that format."""

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields all slices in blocks of BLOCK_BYTES: (range, float32 [n, length])."""
        step = _per_block(self.length)
        for start in range(0, self.count, step):
            stop = min(start + step, self.count)
            yield slice(start, stop), np.ascontiguousarray(self.read(start, stop))


def weights_of(
    model: Model, role: str, axis: Axis, gram: np.ndarray | None = None, importance: np.ndarray | None = None
) -> Weights:
    """Returns the slices along `axis` of a matrix of the model; columns keep the whole matrix in memory while used."""
    rows, columns = model.tensors[role].shape
    if axis == "row":
        read = partial(read_rows, model, role)
        return Weights(rows, columns, axis, read, gram, importance, partial(_own_codes, model, role))
    return Weights(columns, rows, axis, _columns(model, role), gram, importance)


def _own_codes(model: Model, role: str, format_name: FormatName) -> np.ndarray | None:
    is_kept = keeps_codes(model, role, load("coldpress.runtime.quantization", Format, format_name))
    return read_codes(model, role) if is_kept else None


def keeps_codes(model: Model, role: str, codec: Format) -> bool:
    """Tells whether the source has a matrix's rows in this format, so that they are not rounded."""
    return codes_type(model, role) == codec.GGUF_TYPE


def _columns(model: Model, role: str) -> Read:
    rows, columns = model.tensors[role].shape
    weight = np.empty((rows, columns), np.float32)
    step = _per_block(columns)
    for start in range(0, rows, step):
        weight[start : start + step] = read_rows(model, role, start, min(start + step, rows))

    def block(start: int, stop: int) -> np.ndarray:
        turned = np.empty((stop - start, rows), np.float32)
        for row in range(0, rows, BAND_ROWS):
            turned[:, row : row + BAND_ROWS] = weight[row : row + BAND_ROWS, start:stop].T
        return turned

    return block


def _per_block(length: int) -> int:
    return max(1, BLOCK_BYTES // (4 * length))


class Algorithm(PluginBase):
    """Chooses the codes of weights. The base class of all rounding algorithms."""

    NEEDS_GRAM: ClassVar[bool] = False
    """True if the algorithm needs the Gram matrices of the inputs (`gram`)."""

    @abstractmethod
    def quantize(self, weights: Weights, format_name: FormatName) -> np.ndarray:
        """Returns the codes of all slices, uint8 [n, nbytes(length)]. Raises ColdpressError if a value or a scale is
        beyond the format's range."""
