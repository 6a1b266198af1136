"""What an order plug-in is given: activations, what never leaves DRAM, and what a read costs against bytes."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Problem:
    """One family of one layer."""

    bits: np.ndarray
    """uint8 [num_units, ceil(num_tokens / 8)], packed activations (schemas/activations.py)."""
    num_tokens: int
    pinned: np.ndarray
    """bool [num_units]: units that `place` keeps in DRAM, hence never reads."""
    gap_cost: float
    """Cost of reading one unit for nothing, in reads: unit bytes * IOPS / bandwidth."""
    seed: int = 0
