"""q4_1: llama.cpp's Q4_1, 5 bits a weight: 4-bit numbers in groups of 32 with a float16 step and minimum."""

from typing import ClassVar

import numpy as np

from coldpress.runtime.quantization._groups import float16, pack, unpack
from coldpress.runtime.quantization._ranges import RangeFormat, Ranges, halves


class Plugin(RangeFormat):
    """20 bytes per 32 values: step, minimum, 16 of numbers."""

    BLOCK = 32
    HIGHEST = 15
    HIGH_BYTES: ClassVar[int] = 0
    """Bytes of the numbers' fifth bits (q5_1), before the bytes of the low four."""
    BLOCK_BYTES = 20
    GGUF_TYPE = "Q4_1"
    IS_COMPARED = True
    MAX_LOGIT_ERROR = 0.7
    MAX_WEIGHT_ERROR = 0.2

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
