"""Multiplies stored rows by vectors, straight from their bytes: selected rows of a store of units, and whole matrices.

Row k of a selection is the slice that begins at byte `offset` of the unit in slot `slots[k]`. `dot_rows` computes gate
and up projections (rows of W times x), `axpy_rows` the down projection (columns of W times coefficients), as in LLM in
a flash 3.2, row-column bundling. Both read only the selected rows. `gemv` is the dense projection of a decoding step.

`matmul` multiplies a matrix by many vectors, for the prefill and for perplexity over blocks of tokens: the native core
decodes weights a piece at a time, once for 8 MB of vectors, and multiplies them in the processor's cache. Memory
besides arguments and result is bounded by these 8 MB and 1 kB per vector, for a matrix of any size.

Each function raises ValueError if a slot, an offset, a length or the format is out of range, and TypeError if an array
has another dtype or is not contiguous. `num_threads` is 0 for the process's default; no bit of a result depends on it
or on the other vectors. `activations` is the format to which vectors are rounded (runtime/kernels/activations.py). A
matrix is uint8[rows, row_bytes], each row a slice of `length` values; rows need not be adjacent.
"""

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.kernels.activations import BITS, ActivationFormat


def dot_rows(
    store: np.ndarray,
    slots: np.ndarray,
    offset: int,
    length: int,
    fmt: str,
    x: np.ndarray,
    num_threads: int = 0,
    activations: ActivationFormat = "fp32",
) -> np.ndarray:
    """Multiplies each selected row by x, float32[length]: float32[k].

    Args:
        store: uint8[num_slots, unit_bytes]; a unit's bytes are contiguous, units need not be adjacent.
        slots: int32[k], in any order, repeats allowed.
        offset: byte of the unit at which the slice of `length` values begins.
    """
    out = np.empty((1, slots.shape[0]), np.float32)
    _native.dot_rows(store, slots, offset, length, fmt, x[None], out, num_threads, BITS[activations])
    return out[0]


def axpy_rows(
    store: np.ndarray,
    slots: np.ndarray,
    offset: int,
    length: int,
    fmt: str,
    coefficients: np.ndarray,
    num_threads: int = 0,
) -> np.ndarray:
    """Sums coefficients[k], float32, times row k, in the order of k: float32[length]; all else is as in `dot_rows`."""
    out = np.empty(length, np.float32)
    _native.axpy_rows(store, slots, offset, length, fmt, coefficients, out, num_threads)
    return out


def gemv(
    matrix: np.ndarray,
    length: int,
    fmt: str,
    x: np.ndarray,
    num_threads: int = 0,
    activations: ActivationFormat = "fp32",
) -> np.ndarray:
    """Multiplies the matrix by x, float32[length]: float32[rows]."""
    out = np.empty((1, matrix.shape[0]), np.float32)
    _native.dot_rows(matrix, None, 0, length, fmt, x[None], out, num_threads, BITS[activations])
    return out[0]


def gemv_each(
    matrix: np.ndarray, length: int, fmt: str, x: np.ndarray, activations: ActivationFormat = "fp32"
) -> np.ndarray:
    """Multiplies the matrix, read once, by 1 to 1024 vectors, float32[tokens, length]: float32[tokens, rows]; each has
    the same bits as in `gemv`."""
    out = np.empty((len(x), matrix.shape[0]), np.float32)
    _native.dot_rows(matrix, None, 0, length, fmt, x, out, 0, BITS[activations])
    return out


def decode_rows(matrix: np.ndarray, length: int, fmt: str, num_threads: int = 0) -> np.ndarray:
    """Decodes the matrix to float32[rows, length], with the same bits as the format's `decode`."""
    out = np.empty((matrix.shape[0], length), np.float32)
    _native.decode_rows(matrix, length, fmt, out, num_threads)
    return out


def matmul(matrix: np.ndarray, length: int, fmt: str, x: np.ndarray, num_threads: int = 0) -> np.ndarray:
    """Multiplies x, float32[tokens, length], copied if it is not contiguous, by the matrix's transpose: float32[tokens,
    rows]."""
    out = np.empty((x.shape[0], matrix.shape[0]), np.float32)
    _native.matmul(matrix, length, fmt, np.ascontiguousarray(x), out, num_threads)
    return out


def matmul_t(matrix: np.ndarray, length: int, fmt: str, c: np.ndarray, num_threads: int = 0) -> np.ndarray:
    """Multiplies c, float32[tokens, rows], copied if it is not contiguous, by the matrix: float32[tokens, length]. Its
    rows are columns of a projection, as units store `down`."""
    out = np.empty((c.shape[0], length), np.float32)
    _native.matmul_t(matrix, length, fmt, np.ascontiguousarray(c), out, num_threads)
    return out
