"""Packs numbers of a few bits into bytes, for the formats' groups of 32 values.

With b bits a number, value i of n lies in bits b (i // m) of byte i mod m, where m = n b / 8; a kernel so shifts whole
vectors of bytes. Three bits are two and one: the low two bits first, then the high ones.
"""

import numpy as np


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Packs numbers below 2 ** bits, uint8 [..., n]: uint8 [..., n * bits / 8]; bits is 1, 2, 3, 4 or 8."""
    if bits == 3:
        return np.concatenate([pack(numbers & 3, 2), pack(numbers >> 2, 1)], axis=-1)
    num_bytes = numbers.shape[-1] * bits // 8
    packed = numbers[..., :num_bytes].copy()
    for index in range(1, 8 // bits):
        packed |= numbers[..., index * num_bytes : (index + 1) * num_bytes] << (index * bits)
    return packed


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `pack`: uint8 [..., m] -> uint8 [..., 8 m / bits]."""
    if bits == 3:
        low = packed.shape[-1] * 2 // 3
        return unpack(packed[..., :low], 2) | unpack(packed[..., low:], 1) << 2
    mask = (1 << bits) - 1
    return np.concatenate([packed >> (index * bits) & mask for index in range(8 // bits)], axis=-1)
