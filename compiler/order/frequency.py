"""Frequency order: the most active units first, ties by id. Keeps hot units together without looking at pairs."""

import numpy as np


def arrange(bits: np.ndarray, num_tokens: int) -> np.ndarray:
    """Unit ids by falling activation count, int32 [num_units]; `bits` as in schemas/activations.py."""
    counts = np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
    return np.argsort(-counts, kind="stable").astype(np.int32)
