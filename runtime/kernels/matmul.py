"""A quantized matrix times many vectors at once: prefill, and perplexity over blocks of tokens.

The native core decodes weights a piece at a time, each once for all vectors (8 MB of them at a time), and multiplies
them while they are near. A product's bits depend neither on threads nor on the vectors beside its own. Memory beyond
arguments and result is bounded by those 8 MB, and 1 kB a vector, however large the matrix; in formats that the native
core does not know, by BLOCK_BYTES for the decoded block, and a partial result.
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
    """uint8[rows, row_bytes] -> float32[rows, length], bit for bit what the format's `decode` gives.

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
    """float32[tokens, rows] = x times the matrix's transpose.

    Args:
        matrix: uint8[rows, row_bytes], each row a slice of `length` values; rows may lie apart.
        length: values in a row.
        fmt: name of the storage format.
        x: float32[tokens, length], copied where it does not lie together.
        parts: its rows, one behind the other, that have the bits which they have alone. In formats that the native core
            does not know each is a product of its own, since those of numpy hang on how many rows there are.
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
    """float32[tokens, length] = c times the matrix: its rows are columns of the projection, as units store `down`.

    Args:
        matrix, length, fmt, parts, num_threads: as in `matmul`.
        c: float32[tokens, rows], copied where it does not lie together.

    Raises:
        ValueError, TypeError: as `coldpress.runtime.kernels.gemv.gemv`.
    """
    if fmt not in NATIVE_FORMATS:
        return reference_matmul_t(matrix, length, fmt, c, parts)
    out = np.empty((c.shape[0], length), np.float32)
    _native.matmul_t(matrix, length, fmt, np.ascontiguousarray(c), out, num_threads)
    return out


def reference_decode_rows(matrix: np.ndarray, length: int, fmt: str) -> np.ndarray:
    """What `decode_rows` computes, in numpy."""
    codec = load("coldpress.runtime.quantization", Format, fmt)
    return codec.decode(matrix[:, : codec.nbytes(length)], length)


def reference_matmul(
    matrix: np.ndarray, length: int, fmt: str, x: np.ndarray, parts: Sequence[slice] = WHOLE
) -> np.ndarray:
    """What `matmul` computes, in numpy, in the type of `x`, a block of rows at a time."""
    out = np.empty((x.shape[0], matrix.shape[0]), x.dtype)
    for rows in _blocks(matrix.shape[0], length):
        block = reference_decode_rows(matrix[rows], length, fmt)
        for part in parts:
            out[part, rows] = x[part] @ block.T
    return out


def reference_matmul_t(
    matrix: np.ndarray, length: int, fmt: str, c: np.ndarray, parts: Sequence[slice] = WHOLE
) -> np.ndarray:
    """What `matmul_t` computes, in numpy, in the type of `c`, a block of rows at a time."""
    out = np.zeros((c.shape[0], length), c.dtype)
    for rows in _blocks(matrix.shape[0], length):
        block = reference_decode_rows(matrix[rows], length, fmt)
        for part in parts:
            out[part] += c[part, rows] @ block
    return out


def _blocks(count: int, length: int) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // (4 * max(1, length)))
    return (slice(start, min(count, start + step)) for start in range(0, count, step))
