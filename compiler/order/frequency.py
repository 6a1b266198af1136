"""Frequency order: the most active units first, ties by id. Keeps hot units together without looking at pairs."""

import numpy as np

from compiler.order._task import Problem


def arrange(problem: Problem) -> np.ndarray:
    """Unit ids by falling activation count, int32 [num_units]."""
    return np.argsort(-problem.totals, kind="stable").astype(np.int32)
