"""Counts how often units are active together, exactly, from packed activation bits (Ripple 4.1, Eqs. 1-2).

Reads uint8 [num_units, ceil(num_tokens / 8)], padding bits 0; counts are exact, and equal for any number of threads.
There are three methods; `pair_counts` takes the cheaper of the first two:

dense    population counts of the AND of two rows, 64 tokens a word, four rows of each side in registers, in tiles that
         stay in a core's cache; the work is num_units ** 2 / 2 * num_tokens / 64 words
sparse   one increment for each pair of units that a token has, for low densities: density ** 2 / 2 of the pairs
gpu      products of 0/1 matrices (torch, on request): half precision in, single precision within, so that 2,048 tokens
         at a time are exact
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite.binding import get_host_cpu_features

from coldpress.compiler.compiled import compiled, population_count, trailing_zeros
from coldpress.schemas.errors import ColdpressError

TILE_UNITS = 64
"""Rows that are compared with as many other rows at a time."""
TILE_WORDS = 512
"""Words of a row per step: the rows of a tile fill a quarter of a megabyte, half of a core's cache."""
WORDS_PER_INCREMENT = 70 if get_host_cpu_features().get("avx512vpopcntdq") else 14
"""Words that the dense method handles in the time of one increment of the sparse one, measured
(docs/experiments/order.md): with and without an instruction that counts eight words at once. Both methods give the
same counts."""
GPU_TOKENS = 2048
"""Largest count that half precision holds exactly."""


def to_words(bits: np.ndarray) -> np.ndarray:
    """Returns packed bits as uint64 [num_units, num_words], zero-padded to whole words; equal bits stay equal."""
    num_units, num_bytes = bits.shape
    words = np.zeros((num_units, -(-num_bytes // 8) * 8), np.uint8)
    words[:, :num_bytes] = bits
    return words.view(np.uint64)


def pair_counts(bits: np.ndarray, num_tokens: int, threads: int = 1) -> np.ndarray:
    """Counts at [i, j] the tokens on which units i < j are both active; the rest of the square is undefined. uint16
    [num_units, num_units], or uint32 from 65,536 tokens on: 411 MB (uint16) for 14,336 units."""
    num_units = len(bits)
    dense_words = num_units * (num_units + 1) // 2 * -(-num_tokens // 64)
    if WORDS_PER_INCREMENT * num_increments(bits) < dense_words:
        return sparse_pair_counts(bits, num_tokens, threads)
    return dense_pair_counts(bits, num_tokens, threads)


def num_increments(bits: np.ndarray) -> int:
    """Counts the pairs of units active on a token, over all tokens: the work of the sparse method."""
    active = _active_units(to_words(bits))
    return int((active * (active - 1) // 2).sum())


def dense_pair_counts(bits: np.ndarray, num_tokens: int, threads: int = 1) -> np.ndarray:
    words, counts = to_words(bits), _empty_counts(len(bits), num_tokens)
    _share(_dense_rows, len(bits), threads, words, counts)
    return counts


def sparse_pair_counts(bits: np.ndarray, num_tokens: int, threads: int = 1) -> np.ndarray:
    """Computes `pair_counts` by increments: unit by unit, so that a row of counts stays in the cache."""
    words, counts = to_words(bits), _empty_counts(len(bits), num_tokens)
    sizes = _active_units(words)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    units = np.empty(int(starts[-1]), np.int32)
    _list_units(words, starts[:-1].copy(), units)
    _share(_sparse_rows, len(bits), threads, words, counts, starts, units)
    return counts


def gpu_pair_counts(bits: np.ndarray, num_tokens: int) -> np.ndarray:
    """Computes `pair_counts` by matrix products on a GPU.

    Raises:
        ColdpressError: if torch finds no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise ColdpressError("counting=gpu needs a CUDA device and torch finds none; use counting=cpu")
    counts = torch.zeros((len(bits), len(bits)), dtype=torch.int32, device="cuda")
    shifts = torch.arange(8, dtype=torch.uint8, device="cuda")
    for start in range(0, bits.shape[1], GPU_TOKENS // 8):
        packed = torch.from_numpy(np.ascontiguousarray(bits[:, start : start + GPU_TOKENS // 8])).cuda()
        active = ((packed[:, :, None] >> shifts) & 1).flatten(1).half()
        for row in range(0, len(bits), GPU_TOKENS):  # above the diagonal only
            counts[row : row + GPU_TOKENS, row:] += (active[row : row + GPU_TOKENS] @ active[row:].T).int()
    kind = torch.uint16 if num_tokens < 1 << 16 else torch.uint32
    return counts.to(kind).cpu().numpy()


def _empty_counts(num_units: int, num_tokens: int) -> np.ndarray:
    return np.zeros((num_units, num_units), np.uint16 if num_tokens < 1 << 16 else np.uint32)


def _share(rows: Any, num_units: int, threads: int, *arguments: np.ndarray) -> None:
    """Runs `rows(first, last, ...)` for all tiles of rows; each cell of the result belongs to one tile."""
    starts = range(0, num_units, TILE_UNITS)
    if threads == 1:
        for start in starts:
            rows(start, min(num_units, start + TILE_UNITS), *arguments)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(rows, start, min(num_units, start + TILE_UNITS), *arguments) for start in starts]:
            done.result()


@compiled
def _dense_rows(first, last, words, counts):
    n, num_words = words.shape
    for column in range(first, n, TILE_UNITS):
        for start in range(0, num_words, TILE_WORDS):
            for i in range(first, last, 4):
                for j in range(column, min(n, column + TILE_UNITS), 4):
                    _count_block(words, counts, i, j, start)


@compiled
def _part(words, row, start):
    """Returns TILE_WORDS words of a row (at most the last row). A view from 0: the compiler would gather otherwise."""
    return words[min(row, words.shape[0] - 1)][start : start + TILE_WORDS]


@compiled
def _count_block(words, counts, i, j, start):
    """Adds 4 x 4 counts over some words; rows beyond the last one repeat it, and their counts are dropped."""
    last = words.shape[0] - 1
    a0, a1 = _part(words, i, start), _part(words, i + 1, start)
    a2, a3 = _part(words, i + 2, start), _part(words, i + 3, start)
    b0, b1 = _part(words, j, start), _part(words, j + 1, start)
    b2, b3 = _part(words, j + 2, start), _part(words, j + 3, start)
    c00 = c01 = c02 = c03 = c10 = c11 = c12 = c13 = c20 = c21 = c22 = c23 = c30 = c31 = c32 = c33 = 0
    for w in range(a0.size):
        x0, x1, x2, x3, y0, y1, y2, y3 = a0[w], a1[w], a2[w], a3[w], b0[w], b1[w], b2[w], b3[w]
        c00, c01 = c00 + population_count(x0 & y0), c01 + population_count(x0 & y1)
        c02, c03 = c02 + population_count(x0 & y2), c03 + population_count(x0 & y3)
        c10, c11 = c10 + population_count(x1 & y0), c11 + population_count(x1 & y1)
        c12, c13 = c12 + population_count(x1 & y2), c13 + population_count(x1 & y3)
        c20, c21 = c20 + population_count(x2 & y0), c21 + population_count(x2 & y1)
        c22, c23 = c22 + population_count(x2 & y2), c23 + population_count(x2 & y3)
        c30, c31 = c30 + population_count(x3 & y0), c31 + population_count(x3 & y1)
        c32, c33 = c32 + population_count(x3 & y2), c33 + population_count(x3 & y3)
    _add_row(counts, i, j, c00, c01, c02, c03)
    if i + 1 <= last:
        _add_row(counts, i + 1, j, c10, c11, c12, c13)
    if i + 2 <= last:
        _add_row(counts, i + 2, j, c20, c21, c22, c23)
    if i + 3 <= last:
        _add_row(counts, i + 3, j, c30, c31, c32, c33)


@compiled
def _add_row(counts, i, j, c0, c1, c2, c3):
    num_columns = min(4, counts.shape[1] - j)
    counts[i, j] += c0
    if num_columns > 1:
        counts[i, j + 1] += c1
    if num_columns > 2:
        counts[i, j + 2] += c2
    if num_columns > 3:
        counts[i, j + 3] += c3


@compiled
def _active_units(words):
    """Counts the active units of each token, int64 [64 * num_words]."""
    sizes = np.zeros(64 * words.shape[1], np.int64)
    for unit in range(words.shape[0]):
        for w in range(words.shape[1]):
            word = words[unit, w]
            while word:
                sizes[64 * w + trailing_zeros(word)] += 1
                word &= word - np.uint64(1)
    return sizes


@compiled
def _list_units(words, places, units):
    """Lists the active units of each token, ascending; `places` starts as each token's first place in the list."""
    for unit in range(words.shape[0]):
        for w in range(words.shape[1]):
            word = words[unit, w]
            while word:
                token = 64 * w + trailing_zeros(word)
                units[places[token]] = unit
                places[token] += 1
                word &= word - np.uint64(1)


@compiled
def _sparse_rows(first, last, words, counts, starts, units):
    for unit in range(first, last):
        for w in range(words.shape[1]):
            word = words[unit, w]
            while word:
                token = 64 * w + trailing_zeros(word)
                place = starts[token + 1] - 1
                while units[place] > unit:
                    counts[unit, units[place]] += 1
                    place -= 1
                word &= word - np.uint64(1)
