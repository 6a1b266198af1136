"""Counts a batch of signals: magnitudes, active units, and how far the largest units of two signals agree.

Works on the bits of floats, float32, bfloat16 or float16: without the sign they order as the magnitudes do, and their
leading bits are the histogram's bins (TEAL's histograms).
"""

from collections.abc import Sequence

import numpy as np

OCTAVE_BINS = 32
FIRST_OCTAVE, LAST_OCTAVE = -24, 16
"""Magnitudes from 2**-24 to 2**16 have bins; the first bin holds all below, zeros included, the last all above."""
FLOAT_BIAS, MANTISSA_BITS = 127, 23
BIN_SHIFT = MANTISSA_BITS - OCTAVE_BINS.bit_length() + 1
FIRST_BIN = (FIRST_OCTAVE + FLOAT_BIAS) * OCTAVE_BINS
NUM_BINS = (LAST_OCTAVE - FIRST_OCTAVE) * OCTAVE_BINS + 2


def magnitude_edges() -> np.ndarray:
    """Bounds of bins, float32 [num_bins + 1]: 32 equal steps per power of two, plus zero and the largest float."""
    inner = (np.arange(NUM_BINS - 1, dtype=np.uint32) + np.uint32(FIRST_BIN)) << np.uint32(BIN_SHIFT)
    return np.concatenate(([np.float32(0)], inner.view(np.float32), [np.finfo(np.float32).max])).astype(np.float32)


def magnitude_histogram(keys: np.ndarray) -> np.ndarray:
    """Counts magnitudes in the bins of `magnitude_edges`, int64 [num_bins]. `keys` are the bits of float32 as uint32,
    or of bfloat16 as uint16: both have float32's exponent."""
    spare_bits = 32 - 8 * keys.itemsize
    bins = (_magnitudes(keys).ravel() >> keys.dtype.type(BIN_SHIFT - spare_bits)).astype(np.int32)
    bins -= FIRST_BIN - 1
    return np.bincount(bins.clip(0, NUM_BINS - 1, out=bins), minlength=NUM_BINS)


def pack_nonzero(keys: np.ndarray) -> np.ndarray:
    """Packs which float signals [T, num_units], given by their bits, are not zero: uint8 [num_units, ceil(T / 8)]. Bit
    t & 7 of byte t >> 3 is token t; padding bits are 0."""
    return np.ascontiguousarray(np.packbits(_magnitudes(keys) != 0, axis=0, bitorder="little").T)


def shared_top(one: np.ndarray, two: np.ndarray, selected: Sequence[int]) -> np.ndarray:
    """Counts units among the k largest of both, summed over tokens: int64 [len(selected)]. `one` and `two` are bits of
    float16 of the same tokens, uint16 [T, num_units]; `selected` are the numbers k, ascending. Of equal magnitudes the
    first units are larger."""
    found = np.zeros(one.shape[1] + 1, np.int64)
    for first, second in zip(one, two, strict=True):
        found += np.bincount(np.maximum(_ranks(first), _ranks(second)), minlength=found.size)
    return found.cumsum()[np.asarray(selected) - 1]


def _ranks(keys: np.ndarray) -> np.ndarray:
    """Returns each unit's place among a token's magnitudes, the largest first, int64 [num_units]."""
    ranks = np.empty(keys.size, np.int64)
    ranks[np.argsort(~_magnitudes(keys), kind="stable")] = np.arange(keys.size)  # sorts 16 bits by radix
    return ranks


def _magnitudes(keys: np.ndarray) -> np.ndarray:
    """Returns the keys without their signs."""
    return keys & keys.dtype.type((1 << (8 * keys.itemsize - 1)) - 1)
