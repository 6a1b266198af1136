"""q6_k: llama.cpp's Q6_K, 6.6 bits a weight: 6-bit numbers around 32 in groups of 16 with 8-bit steps."""

import numpy as np

from coldpress.runtime.quantization._ranges import Ranges, halves, stored, two_levels
from coldpress.runtime.quantization._super_blocks import SuperBlocks, packed_twos, unpacked_twos


class Plugin(SuperBlocks):
    """210 bytes per 256 values: 128 of low four bits, 64 of high two bits, 16 signed steps, d."""

    GROUP = 16
    HIGHEST, ZERO = 63, 32
    BLOCK_BYTES = 210
    GGUF_TYPE = "Q6_K"
    IS_COMPARED = True
    MAX_LOGIT_ERROR = 0.3
    MAX_WEIGHT_ERROR = 0.05

    def held(self, steps: np.ndarray, starts: np.ndarray) -> Ranges:
        unit, scales = two_levels(steps, -128, 127, self.name())
        header = np.concatenate([scales.astype(np.int8).view(np.uint8), stored(unit)], axis=-1)
        return Ranges(unit * scales, -self.ZERO * (unit * scales), header)

    def join(self, numbers: np.ndarray, header: np.ndarray) -> np.ndarray:
        low = (numbers & 15).reshape(-1, 2, 2, 64)
        packed = (low[:, :, 0] | low[:, :, 1] << 4).reshape(-1, 128)
        return np.concatenate([packed, packed_twos(numbers >> 4), header], axis=-1)

    def split(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        low = blocks[:, :128].reshape(-1, 2, 1, 64)
        numbers = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, self.BLOCK)
        numbers |= unpacked_twos(blocks[:, 128:192]) << 4
        steps = halves(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
        return numbers, steps, -self.ZERO * steps
