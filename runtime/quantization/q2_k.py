"""q2_k: llama.cpp's Q2_K, 2.6 bits a weight: 2-bit numbers in groups of 16 with 4-bit steps and minimums."""

import numpy as np

from coldpress.runtime.quantization._ranges import Ranges, halves, stored, two_levels
from coldpress.runtime.quantization._super_blocks import SuperBlocks, packed_twos, unpacked_twos


class Plugin(SuperBlocks):
    """84 bytes per 256 values: 16 of steps and minimums, 64 of numbers, d, dmin."""

    GROUP = 16
    HIGHEST = 3
    BLOCK_BYTES = 84
    GGUF_TYPE = "Q2_K"
    MAX_LOGIT_ERROR = 2.0
    MAX_WEIGHT_ERROR = 0.6

    def held(self, steps: np.ndarray, starts: np.ndarray) -> Ranges:
        unit, scales = two_levels(steps, 0, 15, self.name())
        least, minimums = two_levels(-starts, 0, 15, self.name())
        both = scales.astype(np.uint8) | minimums.astype(np.uint8) << 4
        return Ranges(unit * scales, -least * minimums, np.concatenate([both, stored(unit), stored(least)], axis=-1))

    def join(self, numbers: np.ndarray, header: np.ndarray) -> np.ndarray:
        return np.concatenate([header[:, :16], packed_twos(numbers), header[:, 16:]], axis=-1)

    def split(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        both = blocks[:, :16]
        steps, minimums = halves(blocks, 80) * (both & 15), halves(blocks, 82) * (both >> 4)
        return unpacked_twos(blocks[:, 16:80]), steps, -minimums
