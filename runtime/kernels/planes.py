"""Units in two planes (runtime/quantization/_planes.py), joined to the codes of the plain format.

The products of runtime/kernels/rows.py and mlp.py take coarse planes beside a store of refinements. Each thread joins a
few units at a time, and multiplies them while they are in the processor's cache: a refined unit has the bits that it
has in the plain format.
"""

from typing import NamedTuple

import numpy as np

from coldpress.runtime import _native


class Coarse(NamedTuple):
    """The coarse planes of units whose refinements are in a store; the k-th chosen unit has `codes[ids[k]]`."""

    codes: np.ndarray
    """uint8[num_units, bytes of a unit's coarse plane]."""
    ids: np.ndarray
    """int32[k]."""
    fmt: str
    """The format in planes, or those of slices of equal lengths with `+` between (schemas/families.py)."""


def join_units(coarse: Coarse, store: np.ndarray, slots: np.ndarray, num_threads: int = 0) -> np.ndarray:
    """Joins units: uint8[k, bytes in the plain format].

    Args:
        store: uint8[num_slots, bytes of a unit's refinement].
        slots: int32[k], the rows of the store.
        num_threads: 0 for the process's default.

    Raises:
        ValueError: if a number is out of range, the rows' lengths do not belong together, or the format has no planes.
        TypeError: if an array has another dtype, or rows whose bytes are not contiguous.
    """
    out = np.empty((slots.size, coarse.codes.shape[1] + store.shape[1]), np.uint8)
    _native.join_units(coarse, store, slots, out, num_threads)
    return out
