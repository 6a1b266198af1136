"""The numbers of a family's units, such as ids, flash positions, slots and requests: their type, and distinct ones.

A large model has millions of units, and a run keeps several numbers about each of them.
"""

from typing import Any

import numpy as np

MOST_SMALL = 15 << 12
"""The most units of a family whose numbers are stored as uint16; it leaves 4,096 numbers that stand for no unit."""


def number_type(num_units: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if num_units <= MOST_SMALL else np.uint32)


def distinct(numbers_N: np.ndarray) -> np.ndarray:
    """Returns the distinct ones of integers [N], ascending, in their dtype. np.unique would import numpy.ma, 4 MB that
    nothing else in a run needs."""
    ascending_N = np.sort(numbers_N)
    is_first_N = np.ones(ascending_N.size, bool)
    np.not_equal(ascending_N[1:], ascending_N[:-1], out=is_first_N[1:])
    return ascending_N[is_first_N]
