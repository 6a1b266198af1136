"""Shared code of llama.cpp's K formats: blocks of 256 values. Steps and starts of a block's groups are small whole
numbers times two float16 of the block."""

from typing import ClassVar

import numpy as np

from coldpress.runtime.quantization._ranges import RangeFormat, Ranges, halves, stored, two_levels

SUPER_BLOCK = 256


class SuperBlocks(RangeFormat):
    BLOCK = MULTIPLE = SUPER_BLOCK


class SixBitRanges(SuperBlocks):
    """Eight groups of 32, with 6-bit steps and starts: d, dmin, 12 bytes of both, then the numbers."""

    HIGH_BYTES: ClassVar[int] = 0
    """Bytes of the numbers' fifth bits, before the bytes of the low four."""

    def held(self, steps: np.ndarray, starts: np.ndarray) -> Ranges:
        unit, scales = two_levels(steps, 0, 63, self.name())
        least, minimums = two_levels(-starts, 0, 63, self.name())
        header = np.concatenate([stored(unit), stored(least), _packed_six(scales, minimums)], axis=-1)
        return Ranges(unit * scales, -least * minimums, header)

    def join(self, numbers: np.ndarray, header: np.ndarray) -> np.ndarray:
        pairs = (numbers & 15).reshape(-1, 4, 2, 32)
        low = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
        high = np.packbits((numbers >> 4).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
        return np.concatenate([header, high[:, : self.HIGH_BYTES], low], axis=-1)

    def split(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scales, minimums = _unpacked_six(blocks[:, 4:16])
        low = blocks[:, 16 + self.HIGH_BYTES :].reshape(-1, 4, 1, 32)
        numbers = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, self.BLOCK)
        if self.HIGH_BYTES:
            high = blocks[:, None, 16 : 16 + self.HIGH_BYTES] >> np.arange(8, dtype=np.uint8)[:, None] & 1
            numbers |= high.reshape(-1, self.BLOCK) << 4
        return numbers, halves(blocks, 0) * scales, -halves(blocks, 2) * minimums


def _packed_six(scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    """Packs eight 6-bit scales and minimums [n, 8]: uint8 [n, 12]."""
    first, second = (np.split(one.astype(np.uint8), 2, axis=-1) for one in (scales, minimums))
    low = (first[1] & 15) | (second[1] & 15) << 4
    return np.concatenate([first[0] | first[1] >> 4 << 6, second[0] | second[1] >> 4 << 6, low], axis=-1)


def _unpacked_six(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales, minimums, low = np.split(packed, 3, axis=-1)
    return (
        np.concatenate([scales & 63, low & 15 | scales >> 6 << 4], axis=-1),
        np.concatenate([minimums & 63, low >> 4 | minimums >> 6 << 4], axis=-1),
    )


def packed_twos(numbers: np.ndarray) -> np.ndarray:
    """Packs numbers of two bits [n, 256]: uint8 [n, 64]. Bits 0, 2, 4, 6 of a half's bytes are values 32 apart."""
    parts = (numbers & 3).reshape(-1, 2, 4, 32)
    return (parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6).reshape(-1, 64)


def unpacked_twos(packed: np.ndarray) -> np.ndarray:
    shifts = (2 * np.arange(4, dtype=np.uint8))[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, SUPER_BLOCK)
