"""What packed activation bits say by themselves (schemas/activations.py), counted by numpy alone."""

import numpy as np


def population(packed: np.ndarray) -> np.ndarray:
    """Set bits of each row of uint8 [n, num_bytes]: int64 [n]."""
    return np.bitwise_count(packed).sum(axis=1, dtype=np.int64)


def adjacent_share(packed: np.ndarray) -> float:
    """Share of set bits with the same bit set in the row before or behind: uint8 [num_units, num_bytes] -> [0, 1]."""
    together = packed[:-1] & packed[1:]
    beside = np.zeros_like(packed)
    beside[1:] |= together
    beside[:-1] |= together
    total = int(population(packed).sum())
    return int(population(beside).sum()) / total if total else 0.0
