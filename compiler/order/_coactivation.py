"""How often units are active together, exactly, from packed activation bits (Ripple 4.1, Eqs. 1-2).

Reads uint8 [num_units, ceil(num_tokens / 8)], padding bits 0; gives counts, never estimates. Counting takes the
population count of the AND of two rows, 64 tokens at a time, with two rows of each side in registers.
"""

import numpy as np

from compiler.order._numba import compiled, population_count

BLOCK_BYTES = 1 << 20
"""Rows that are compared with each other at a time: both blocks stay in a core's cache."""


def to_words(bits: np.ndarray) -> np.ndarray:
    """Packed bits as uint64 [num_units, num_words], zero-padded to whole words; equal bits stay equal."""
    num_units, num_bytes = bits.shape
    words = np.zeros((num_units, -(-num_bytes // 8) * 8), np.uint8)
    words[:, :num_bytes] = bits
    return words.view(np.uint64)


def pair_counts(bits: np.ndarray, num_tokens: int) -> np.ndarray:
    """Tokens on which units i < j are both active, at [i, j]; the rest of the square means nothing.

    uint16 [num_units, num_units], or uint32 where there are more tokens than that can count: 411 MB for 14,336 units.
    """
    words = to_words(bits)
    num_units, num_words = words.shape
    counts = np.zeros((num_units, num_units), np.uint16 if num_tokens < 1 << 16 else np.uint32)
    block = max(2, BLOCK_BYTES // (8 * max(1, num_words)) // 2 * 2)
    _count_pairs(words, counts, block)
    return counts


def adjacent_share(bits: np.ndarray, order: np.ndarray) -> float:
    """Share of all activations whose flash neighbour, before or behind, is active on the same token; 0 without any."""
    rows = to_words(bits)[order]
    together = rows[:-1] & rows[1:]
    beside = np.zeros_like(rows)
    beside[1:] |= together
    beside[:-1] |= together
    total = int(np.bitwise_count(rows).sum(dtype=np.int64))
    return int(np.bitwise_count(beside).sum(dtype=np.int64)) / total if total else 0.0


@compiled
def _count_pairs(words, counts, block):
    n, num_words = words.shape
    for row_start in range(0, n, block):
        row_stop = min(n, row_start + block)
        for column_start in range(row_start, n, block):
            column_stop = min(n, column_start + block)
            for i in range(row_start, row_stop, 2):
                i2 = min(i + 1, n - 1)
                first = column_start if column_start > row_start else i
                for j in range(first, column_stop, 2):
                    j2 = min(j + 1, n - 1)
                    c00 = c01 = c10 = c11 = np.uint64(0)
                    for w in range(num_words):
                        a, b, c, d = words[i, w], words[i2, w], words[j, w], words[j2, w]
                        c00 += population_count(a & c)
                        c01 += population_count(a & d)
                        c10 += population_count(b & c)
                        c11 += population_count(b & d)
                    counts[i, j], counts[i, j2], counts[i2, j], counts[i2, j2] = c00, c01, c10, c11
