"""Multiplies a quantized matrix by many vectors at once: for the prefill, and for perplexity over blocks of tokens.

The native core decodes weights a piece at a time, once for all vectors (8 MB of vectors at a time), and multiplies them
while they are in the processor's cache. A product's bits depend neither on threads nor on the other vectors. Memory
besides arguments and result is bounded by these 8 MB and 1 kB per vector, for a matrix of any size; in formats that the
native core does not know, by BLOCK_BYTES for the decoded block, and a partial result.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.kernels import NATIVE_FORMATS
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format

BLOCK_BYTES = 4 << 20
WHOLE = (slice(None),)


def decode_rows(matrix: np.ndarray, length: int, fmt: str, num_threads: int = 0) -> np.ndarray:
    """Decodes uint8[rows, row_bytes] to float32[rows, length], with the same bits as the format's `decode`.

    Raises:
        ValueError, TypeError: as `coldpress.runtime.kernels.gemv.gemv`.
    """
    if fmt not in NATIVE_FORMATS:
        return reference_decode_rows(matrix, length, fmt)
    out = np.empty((matrix.shape[0], length), np.float32)
    _native.decode_rows(matrix, length, fmt, out, num_threads)
    return out


def matmul(
    matrix: np.ndarray,
    length: int,
    fmt: str,
    x: np.ndarray,
    parts: Sequence[slice] = WHOLE,
    num_threads: int = 0,
) -> np.ndarray:
    """Multiplies x by the matrix's transpose: float32[tokens, rows].

    Args:
        matrix: uint8[rows, row_bytes], each row a slice of `length` values; rows need not be adjacent.
        length: values in a row.
        fmt: name of the storage format.
        x: float32[tokens, length], copied if it is not contiguous.
        parts: consecutive ranges of x's rows that must give the same bits alone and together. Only formats that the
            native core does not know need them: numpy's products depend on the number of rows, so each range is
            multiplied separately.
        num_threads: 0 for the process's default; no bit of the result depends on it.

    Raises:
        ValueError, TypeError: as `coldpress.runtime.kernels.gemv.gemv`.
    """
    if fmt not in NATIVE_FORMATS:
        return reference_matmul(matrix, length, fmt, x, parts)
    out = np.empty((x.shape[0], matrix.shape[0]), np.float32)
    _native.matmul(matrix, length, fmt, np.ascontiguousarray(x), out, num_threads)
    return out


def matmul_t(
    matrix: np.ndarray,
    length: int,
    fmt: str,
    c: np.ndarray,
    parts: Sequence[slice] = WHOLE,
    num_threads: int = 0,
) -> np.ndarray:
    """Multiplies c by the matrix: float32[tokens, length]. Its rows are columns of a projection, as units store `down`.

    Args:
        matrix, length, fmt, parts, num_threads: as in `matmul`.
        c: float32[tokens, rows], copied if it is not contiguous.

    Raises:
        ValueError, TypeError: as `coldpress.runtime.kernels.gemv.gemv`.
    """
    if fmt not in NATIVE_FORMATS:
        return reference_matmul_t(matrix, length, fmt, c, parts)
    out = np.empty((c.shape[0], length), np.float32)
    _native.matmul_t(matrix, length, fmt, np.ascontiguousarray(c), out, num_threads)
    return out


def reference_decode_rows(matrix: np.ndarray, length: int, fmt: str) -> np.ndarray:
    """Computes `decode_rows` in numpy."""
    codec = load("coldpress.runtime.quantization", Format, fmt)
    return codec.decode(matrix[:, : codec.nbytes(length)], length)


def reference_matmul(
    matrix: np.ndarray, length: int, fmt: str, x: np.ndarray, parts: Sequence[slice] = WHOLE
) -> np.ndarray:
    """Computes `matmul` in numpy, in the type of `x`, a block of rows at a time."""
    out = np.empty((x.shape[0], matrix.shape[0]), x.dtype)
    for rows in _blocks(matrix.shape[0], length):
        block = reference_decode_rows(matrix[rows], length, fmt)
        for part in parts:
            out[part, rows] = x[part] @ block.T
    return out


def reference_matmul_t(
    matrix: np.ndarray, length: int, fmt: str, c: np.ndarray, parts: Sequence[slice] = WHOLE
) -> np.ndarray:
    """Computes `matmul_t` in numpy, in the type of `c`, a block of rows at a time."""
    out = np.zeros((c.shape[0], length), c.dtype)
    for rows in _blocks(matrix.shape[0], length):
        block = reference_decode_rows(matrix[rows], length, fmt)
        for part in parts:
            out[part] += c[part, rows] @ block
    return out


def _blocks(count: int, length: int) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // (4 * max(1, length)))
    return (slice(start, min(count, start + step)) for start in range(0, count, step))
