"""q3_k: llama.cpp's Q3_K, 3.4 bits a weight: 3-bit numbers around 4 in groups of 16 with 6-bit steps."""

import numpy as np

from coldpress.runtime.quantization._ranges import Ranges, halves, stored, two_levels
from coldpress.runtime.quantization._super_blocks import SuperBlocks, packed_twos, unpacked_twos

OFFSET = 32
"""Added to steps, which are stored without a sign."""


class Plugin(SuperBlocks):
    """110 bytes per 256 values: 32 of third bits, 64 of low two bits, 12 of steps, d."""

    GROUP = 16
    HIGHEST, ZERO = 7, 4
    BLOCK_BYTES = 110
    GGUF_TYPE = "Q3_K"
    IS_COMPARED = True
    MAX_LOGIT_ERROR = 1.2
    MAX_WEIGHT_ERROR = 0.4

    def held(self, steps: np.ndarray, starts: np.ndarray) -> Ranges:
        unit, scales = two_levels(steps, -32, 31, self.name())
        numbers = (scales + OFFSET).astype(np.uint8)
        low = numbers[..., :8] & 15 | (numbers[..., 8:] & 15) << 4
        high = (numbers >> 4).reshape(-1, 4, 4)
        packed = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
        return Ranges(unit * scales, -self.ZERO * (unit * scales), np.concatenate([low, packed, stored(unit)], axis=-1))

    def join(self, numbers: np.ndarray, header: np.ndarray) -> np.ndarray:
        high = np.packbits((numbers >> 2).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
        return np.concatenate([high, packed_twos(numbers), header], axis=-1)

    def split(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        high = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        numbers = unpacked_twos(blocks[:, 32:96]) | high.reshape(-1, self.BLOCK) << 2
        low, packed = blocks[:, 96:104], blocks[:, 104:108]
        twos = (packed[:, None] >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3).reshape(-1, 16)
        scales = (np.concatenate([low & 15, low >> 4], axis=-1) | twos << 4).astype(np.float32) - OFFSET
        steps = halves(blocks, 108) * scales
        return numbers, steps, -self.ZERO * steps
