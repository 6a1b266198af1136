"""Multiplies a quantized matrix by many vectors at once: for the prefill, and for perplexity over blocks of tokens.

The native core decodes weights a piece at a time, once for all vectors (8 MB of vectors at a time), and multiplies them
while they are in the processor's cache. A product's bits depend neither on threads nor on the other vectors. Memory
besides arguments and result is bounded by these 8 MB and 1 kB per vector, for a matrix of any size.
"""

import numpy as np

from coldpress.runtime import _native


def decode_rows(matrix: np.ndarray, length: int, fmt: str, num_threads: int = 0) -> np.ndarray:
    """Decodes uint8[rows, row_bytes] to float32[rows, length], with the same bits as the format's `decode`. Raises as
    `coldpress.runtime.kernels.gemv.gemv`."""
    out = np.empty((matrix.shape[0], length), np.float32)
    _native.decode_rows(matrix, length, fmt, out, num_threads)
    return out


def matmul(
    matrix: np.ndarray,
    length: int,
    fmt: str,
    x: np.ndarray,
    num_threads: int = 0,
) -> np.ndarray:
    """Multiplies x by the matrix's transpose: float32[tokens, rows].

    `x` is float32[tokens, length], copied if it is not contiguous. `matrix` is uint8[rows, row_bytes], each row a slice
    of `length` values; rows need not be adjacent. `num_threads` is 0 for the process's default; no bit of the result
    depends on it. Raises as `coldpress.runtime.kernels.gemv.gemv`.
    """
    out = np.empty((x.shape[0], matrix.shape[0]), np.float32)
    _native.matmul(matrix, length, fmt, np.ascontiguousarray(x), out, num_threads)
    return out


def matmul_t(
    matrix: np.ndarray,
    length: int,
    fmt: str,
    c: np.ndarray,
    num_threads: int = 0,
) -> np.ndarray:
    """Multiplies c by the matrix: float32[tokens, length]. Its rows are columns of a projection, as units store `down`.
    `c` is float32[tokens, rows], copied if it is not contiguous. All else is as in `matmul`."""
    out = np.empty((c.shape[0], length), np.float32)
    _native.matmul_t(matrix, length, fmt, np.ascontiguousarray(c), out, num_threads)
    return out
