"""Shared code of q4_1 and q5_1: blocks of one group of 32, with a float16 step and a float16 minimum."""

from typing import ClassVar

import numpy as np

from coldpress.runtime.quantization._bits import pack, unpack
from coldpress.runtime.quantization._groups import float16
from coldpress.runtime.quantization._ranges import RangeFormat, Ranges, halves


class HalfRanges(RangeFormat):
    BLOCK = 32
    HIGH_BYTES: ClassVar[int] = 0
    """Bytes of the numbers' fifth bits, before the bytes of the low four."""

    def held(self, steps: np.ndarray, starts: np.ndarray) -> Ranges:
        both = float16(np.concatenate([steps, starts], axis=-1), self.name())
        return Ranges(both[:, :1].astype(np.float32), both[:, 1:].astype(np.float32), both.view(np.uint8))

    def join(self, numbers: np.ndarray, header: np.ndarray) -> np.ndarray:
        high = np.packbits(numbers >> 4, axis=-1, bitorder="little")
        return np.concatenate([header, high[:, : self.HIGH_BYTES], pack(numbers & 15, 4)], axis=-1)

    def split(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        numbers = unpack(blocks[:, 4 + self.HIGH_BYTES :], 4)
        if self.HIGH_BYTES:
            numbers |= np.unpackbits(blocks[:, 4 : 4 + self.HIGH_BYTES], axis=-1, bitorder="little") << 4
        return numbers, halves(blocks, 0), halves(blocks, 2)
