"""A baseline: contiguous chunks of flash taken greedily by importance over seconds.

After the description of Neuron Chunking (2511.18692), which has no public code; this is not its authors'.
"""

import numpy as np

from coldpress.compiler.compiled import compiled
from coldpress.schemas.law import combined

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Units of a chunk, at every place."""


def greedy_chunks(importance: np.ndarray, read_units: np.ndarray, wanted: int) -> np.ndarray:
    """bool [T, num_units]: disjoint chunks, the best first, until `wanted` units are read.

    Args:
        importance: float [T, num_units] in flash order.
        read_units: What a read costs besides, float64 [4] (compiler/cost_model.py).
        wanted: Units of a token; the last chunk may exceed it.
    """
    units, (own, edge, _, overlap) = importance.shape[1], read_units
    sizes = [size for size in CHUNKS if size <= units]
    starts = np.concatenate([np.arange(units - size + 1) for size in sizes])
    lengths = np.concatenate([np.full(units - size + 1, size) for size in sizes])
    sums = np.concatenate([np.zeros((len(importance), 1)), np.cumsum(importance, axis=1, dtype=np.float64)], axis=1)
    taken = np.zeros(importance.shape, bool)
    for row, total in zip(taken, sums, strict=True):
        worth = (total[starts + lengths] - total[starts]) / combined((own, lengths + edge, 0.0), float(overlap))
        _take(starts, lengths, np.argsort(-worth, kind="stable"), wanted, row)
    return taken


@compiled
def _take(starts, lengths, ranking, wanted, row):  # type: ignore[no-untyped-def]
    count = 0
    for index in ranking:
        if count >= wanted:
            return
        start, stop = starts[index], starts[index] + lengths[index]
        free = True
        for unit in range(start, stop):
            free = free and not row[unit]
        if free:
            row[start:stop] = True
            count += stop - start
