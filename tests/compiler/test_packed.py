"""Counts of packed bits, by hand and against plain numpy."""

import numpy as np

from coldpress.compiler.activity.packed_bits import adjacent_share, population


def test_population_counts_rows() -> None:
    active = np.random.default_rng(0).random((7, 53)) < 0.4
    assert (population(np.packbits(active, axis=1, bitorder="little")) == active.sum(axis=1)).all()


def test_adjacent_share_counts_either_neighbour() -> None:
    rows = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 1, 0]], np.uint8)
    packed = np.packbits(rows, axis=1, bitorder="little")
    assert adjacent_share(packed) == 4 / 6  # rows 0 and 1 in column 1, rows 2 and 3 in column 2
    assert adjacent_share(packed[[1, 2, 0, 3]]) == 2 / 6  # rows 0 and 3 in column 1
    assert adjacent_share(np.zeros_like(packed)) == 0.0
