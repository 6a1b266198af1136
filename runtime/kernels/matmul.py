"""A quantized matrix times many vectors at once: prefill, and perplexity over blocks of tokens.

Blocks of rows are decoded to float32 by the native core and multiplied by BLAS. Memory beyond arguments and result is
bounded by BLOCK_BYTES for the decoded block, and as much again for a partial result, however large the matrix.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from runtime import _native
from runtime._plugins import load
from runtime.kernels import NATIVE_FORMATS

BLOCK_BYTES = 4 << 20
_GROUP = 32


def decode_rows(matrix: np.ndarray, length: int, fmt: str, num_threads: int = 0) -> np.ndarray:
    """uint8[rows, row_bytes] -> float32[rows, length], bit for bit what the format's `decode` gives.

    Raises:
        ValueError, TypeError: as `runtime.kernels.gemv.gemv`.
    """
    if fmt not in NATIVE_FORMATS:
        return reference_decode_rows(matrix, length, fmt)
    out = np.empty((matrix.shape[0], length), np.float32)
    _native.decode_rows(matrix, length, fmt, out, num_threads)
    return out


def matmul(
    matrix: np.ndarray, length: int, fmt: str, x: np.ndarray, parts: Sequence[slice] = (slice(None),)
) -> np.ndarray:
    """float32[tokens, rows] = x times the matrix's transpose.

    Args:
        matrix: uint8[rows, row_bytes], each row a slice of `length` values; rows may lie apart.
        length: values in a row.
        fmt: name of the storage format.
        x: float32[tokens, length].
        parts: its rows, those of each product that BLAS is asked for: a part has the bits that it has alone, where the
            sums of a whole product hang on how many rows it has.

    Raises:
        ValueError, TypeError: as `runtime.kernels.gemv.gemv`.
    """
    out = np.empty((x.shape[0], matrix.shape[0]), np.float32)
    for rows in _ranges(matrix.shape[0], max(1, BLOCK_BYTES // (4 * max(1, length)))):
        block = decode_rows(matrix[rows], length, fmt)
        for part in parts:
            np.matmul(x[part], block.T, out=out[part, rows])
    return out


def matmul_t(
    matrix: np.ndarray, length: int, fmt: str, c: np.ndarray, parts: Sequence[slice] = (slice(None),)
) -> np.ndarray:
    """float32[tokens, length] = c times the matrix: its rows are columns of the projection, as units store `down`.

    Args:
        matrix, length, fmt, parts: as in `matmul`.
        c: float32[tokens, rows].

    Raises:
        ValueError, TypeError: as `runtime.kernels.gemv.gemv`.
    """
    tokens, count = c.shape
    out = np.zeros((tokens, length), np.float32)
    for rows in _ranges(count, max(1, BLOCK_BYTES // (4 * max(1, length)))):
        block = decode_rows(matrix[rows], length, fmt)
        for part in parts:
            of_part = c[part, rows]
            for columns in _ranges(length, _column_width(len(of_part), length)):
                out[part, columns] += of_part @ block[:, columns]
    return out


def reference_decode_rows(matrix: np.ndarray, length: int, fmt: str) -> np.ndarray:
    """What `decode_rows` computes, in numpy."""
    plugin = load("runtime.quantization", fmt)
    return plugin.decode(matrix[:, : plugin.nbytes(length)], length)


def reference_matmul(matrix: np.ndarray, length: int, fmt: str, x: np.ndarray) -> np.ndarray:
    """What `matmul` computes, in numpy and with the whole matrix decoded."""
    return x @ reference_decode_rows(matrix, length, fmt).T


def reference_matmul_t(matrix: np.ndarray, length: int, fmt: str, c: np.ndarray) -> np.ndarray:
    """What `matmul_t` computes, in numpy and with the whole matrix decoded."""
    return c @ reference_decode_rows(matrix, length, fmt)


def _column_width(tokens: int, length: int) -> int:
    return max(_GROUP, min(length, BLOCK_BYTES // (4 * max(1, tokens))))


def _ranges(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(count, start + step)) for start in range(0, count, step))
