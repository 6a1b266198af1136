"""Counts a batch of signals: magnitudes, active units, and how far the largest units of two signals agree.

Works on the bits of floats, float32, bfloat16 or float16: without the sign they order as the magnitudes do, and their
leading bits are the histogram's bins (TEAL's histograms). The loops are compiled and release the interpreter's lock, so
threads can count blocks of tokens side by side.
"""

from collections.abc import Sequence

import numpy as np

from coldpress.compiler.compiled import compiled

OCTAVE_BINS = 32
FIRST_OCTAVE, LAST_OCTAVE = -24, 16
"""Magnitudes from 2**-24 to 2**16 have bins; the first bin holds all below, zeros included, the last all above."""
FLOAT_BIAS, MANTISSA_BITS = 127, 23
BIN_SHIFT = MANTISSA_BITS - OCTAVE_BINS.bit_length() + 1
FIRST_BIN = (FIRST_OCTAVE + FLOAT_BIAS) * OCTAVE_BINS
NUM_BINS = (LAST_OCTAVE - FIRST_OCTAVE) * OCTAVE_BINS + 2

KEY_BITS = 15
"""Bits of a float16 magnitude: one counter per value finds the k-th largest."""


def magnitude_edges() -> np.ndarray:
    """Bounds of bins, float32 [num_bins + 1]: 32 equal steps per power of two, plus zero and the largest float."""
    inner = (np.arange(NUM_BINS - 1, dtype=np.uint32) + np.uint32(FIRST_BIN)) << np.uint32(BIN_SHIFT)
    return np.concatenate(([np.float32(0)], inner.view(np.float32), [np.finfo(np.float32).max])).astype(np.float32)


def magnitude_histogram(keys: np.ndarray) -> np.ndarray:
    """Counts magnitudes in the bins of `magnitude_edges`, int64 [num_bins]. `keys` are the bits of float32 as uint32,
    or of bfloat16 as uint16: both have float32's exponent."""
    counts = np.zeros(NUM_BINS, np.int64)
    spare_bits = 32 - 8 * keys.itemsize
    _count_bins(np.ascontiguousarray(keys).ravel(), _magnitude(keys), BIN_SHIFT - spare_bits, counts)
    return counts


def pack_nonzero(keys: np.ndarray) -> np.ndarray:
    """Packs which float signals [T, num_units], given by their bits, are not zero: uint8 [num_units, ceil(T / 8)]. Bit
    t & 7 of byte t >> 3 is token t; padding bits are 0."""
    packed = np.zeros((-(-len(keys) // 8), keys.shape[1]), np.uint8)
    _pack(keys, _magnitude(keys), packed)
    return np.ascontiguousarray(packed.T)


def shared_top(one: np.ndarray, two: np.ndarray, selected: Sequence[int]) -> np.ndarray:
    """Counts units among the k largest of both, summed over tokens: int64 [len(selected)]. `one` and `two` are bits of
    float16 of the same tokens, uint16 [T, num_units]; `selected` are the numbers k, ascending."""
    found = np.zeros(len(selected), np.int64)
    _count_shared(one, two, _magnitude(one), np.array(selected, np.int64), found)
    return found


def _magnitude(keys: np.ndarray) -> np.generic:
    """Returns the mask of all bits but the sign, of the keys' type."""
    return keys.dtype.type((1 << (8 * keys.itemsize - 1)) - 1)


@compiled
def _count_bins(keys, mask, shift, counts):
    last = len(counts) - 1
    zeros = 0
    for index in range(len(keys)):
        key = keys[index] & mask
        if key == 0:  # most values after a ReLU; each counts[0] += 1 would wait for the one before
            zeros += 1
            continue
        place = (np.int64(key) >> shift) - (FIRST_BIN - 1)
        counts[min(max(place, 0), last)] += 1
    counts[0] += zeros


@compiled
def _pack(keys, mask, packed):
    num_tokens, num_units = keys.shape
    for token in range(num_tokens):
        row, bit = packed[token >> 3], np.uint8(1 << (token & 7))
        for unit in range(num_units):
            if keys[token, unit] & mask != 0:
                row[unit] |= bit


@compiled
def _fill(row, mask, low_bits, counts):
    """Counts magnitudes by their leading bits; returns the highest bin in use."""
    counts[:] = 0
    largest = row[0] & mask
    for key in row:
        counts[np.int64(key & mask) >> low_bits] += 1
        largest = max(largest, key & mask)
    return np.int64(largest) >> low_bits


@compiled
def _boundary(counts, place, above, wanted):
    """Goes down from `place`, with `above` values over it; returns (bin of the wanted-th largest, values over it)."""
    while above + counts[place] < wanted:
        above += counts[place]
        place -= 1
    return place, above


@compiled
def _tie_stop(row, mask, smallest, num_ties):
    """Returns the unit after the last one that is taken of those equal to `smallest`."""
    stop = 0
    while num_ties > 0:
        num_ties -= row[stop] & mask == smallest
        stop += 1
    return stop


@compiled
def _thresholds(row, mask, selected, counts, smallest, stops):
    """Finds, for each k, the k-th largest magnitude, and the unit after the last taken one of those equal to it."""
    place, above = _fill(row, mask, 0, counts), 0
    for index in range(len(selected)):
        place, above = _boundary(counts, place, above, selected[index])
        smallest[index] = place
        stops[index] = _tie_stop(row, mask, place, selected[index] - above)


@compiled
def _count_shared(one, two, mask, selected, found):
    counts = np.zeros(1 << KEY_BITS, np.int32)
    smallest = np.zeros((2, len(selected)), np.uint16)
    stops = np.zeros((2, len(selected)), np.int64)
    for token in range(len(one)):
        first, second = one[token], two[token]
        _thresholds(first, mask, selected, counts, smallest[0], stops[0])
        _thresholds(second, mask, selected, counts, smallest[1], stops[1])
        for index in range(len(selected)):
            least_a, least_b = smallest[0, index], smallest[1, index]
            stop_a, stop_b = stops[0, index], stops[1, index]
            shared = 0
            for unit in range(len(first)):
                a, b = first[unit] & mask, second[unit] & mask
                in_one = (a > least_a) | ((a == least_a) & (unit < stop_a))
                in_two = (b > least_b) | ((b == least_b) & (unit < stop_b))
                shared += in_one & in_two
            found[index] += shared
