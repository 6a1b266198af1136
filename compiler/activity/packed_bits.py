"""Statistics of packed activation bits (schemas/activations.py), computed with numpy only."""

import numpy as np


def population(packed: np.ndarray) -> np.ndarray:
    """Counts the set bits of each row of uint8 [n, num_bytes]: int64 [n]."""
    return np.bitwise_count(packed).sum(axis=1, dtype=np.int64)


def adjacent_share(packed: np.ndarray) -> float:
    """Returns the share of set bits that are also set in the row before or after: uint8 [num_units, num_bytes] -> [0,
    1]."""
    together = packed[:-1] & packed[1:]
    beside = np.zeros_like(packed)
    beside[1:] |= together
    beside[:-1] |= together
    total = int(population(packed).sum())
    return int(population(beside).sum()) / total if total else 0.0
