"""Multiplies by selected rows of a store of units, straight from their bytes.

Row k is the slice that begins at byte `offset` of the unit in slot `slots[k]`. `dot_rows` computes gate and up
projections (rows of W times x), `axpy_rows` the down projection (columns of W times coefficients): LLM in a flash 3.2,
row-column bundling. Both read only the selected rows.
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
        num_threads: 0 for the process's default; no bit of the result depends on it.
        activations: format that x is rounded to first (runtime/kernels/activations.py).

    Raises:
        ValueError: if a slot, the offset, a length or the format is out of range.
        TypeError: if an array has another dtype or is not contiguous.
    """
    out = np.empty(slots.shape[0], np.float32)
    _native.dot_rows(store, slots, offset, length, fmt, x, out, num_threads, BITS[activations])
    return out


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
