"""Multiplies a resident matrix by one vector, straight from its bytes: the dense projections of a decoding step."""

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.kernels.activations import BITS, ActivationFormat


def gemv(
    matrix: np.ndarray,
    length: int,
    fmt: str,
    x: np.ndarray,
    num_threads: int = 0,
    activations: ActivationFormat = "fp32",
) -> np.ndarray:
    """Multiplies the matrix by x, float32[length]: float32[rows].

    Args:
        matrix: uint8[rows, row_bytes], each row a slice of `length` values; rows need not be adjacent.
        num_threads: 0 for the process's default; no bit of the result depends on it.
        activations: format that x is rounded to first (runtime/kernels/activations.py).

    Raises:
        ValueError: if a length or the format does not fit the matrix.
        TypeError: if an array has another dtype or is not contiguous.
    """
    out = np.empty(matrix.shape[0], np.float32)
    _native.gemv(matrix, length, fmt, x, out, num_threads, BITS[activations])
    return out


def gemv_each(
    matrix: np.ndarray, length: int, fmt: str, x: np.ndarray, activations: ActivationFormat = "fp32"
) -> np.ndarray:
    """Multiplies the matrix, read once, by a few vectors: float32[tokens, rows]; each has the same bits as in `gemv`.
    `x` is float32[tokens, length]; 1 to 1024 tokens. All else is as in `gemv`."""
    out = np.empty((len(x), matrix.shape[0]), np.float32)
    _native.gemv_each(matrix, length, fmt, x, out, 0, BITS[activations])
    return out
