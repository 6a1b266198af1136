"""Packs numbers of a few bits into bytes, for the formats' groups of 32 values.

With b bits a number, value i of n lies in bits b (i // m) of byte i mod m, where m = n b / 8; a kernel so shifts whole
vectors of bytes.
"""

import numpy as np


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Packs numbers below 2 ** bits, uint8 [..., n]: uint8 [..., n * bits / 8]; bits is 1, 2, 4 or 8."""
    num_bytes = numbers.shape[-1] * bits // 8
    packed = numbers[..., :num_bytes].copy()
    for index in range(1, 8 // bits):
        packed |= numbers[..., index * num_bytes : (index + 1) * num_bytes] << (index * bits)
    return packed


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `pack`: uint8 [..., m] -> uint8 [..., 8 m / bits]."""
    mask = (1 << bits) - 1
    return np.concatenate([packed >> (index * bits) & mask for index in range(8 // bits)], axis=-1)
