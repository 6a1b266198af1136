"""Says in which type the numbers of a family's units are stored: ids, flash positions, slots, requests.

A large model has millions of units, and a run keeps several numbers about each of them.
"""

from typing import Any

import numpy as np

MOST_SMALL = 15 << 12
"""The most units of a family whose numbers are stored as uint16; it leaves 4,096 numbers that stand for no unit."""


def number_type(num_units: int) -> np.dtype[Any]:
    """Returns the smallest unsigned type for the numbers of a family of `num_units` units of a layer."""
    return np.dtype(np.uint16 if num_units <= MOST_SMALL else np.uint32)
