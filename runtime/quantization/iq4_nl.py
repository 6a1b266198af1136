"""iq4_nl: llama.cpp's IQ4_NL, 4.5 bits a weight: groups of 32 values, each a float16 scale d; value = LEVELS[q] * d,
with 16 levels that lie closer around 0."""

import numpy as np

from coldpress.runtime.quantization._groups import GROUP, GroupFormat, inverse, pack, unpack

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2
NUMBERS = np.searchsorted(LEVELS, np.arange(-127, 114)).astype(np.uint8)
"""Level + 127 -> its number."""


class Plugin(GroupFormat):
    """18 bytes per 32 values: the scale and 16 of numbers, in q4_0's order."""

    LOWEST, HIGHEST = -127, 113
    CODE_BYTES = GROUP // 2
    GGUF_TYPE = "IQ4_NL"
    MAX_LOGIT_ERROR = 0.7
    MAX_WEIGHT_ERROR = 0.2

    def pack_bits(self, q: np.ndarray) -> np.ndarray:
        return pack(q, 4)

    def unpack_bits(self, codes: np.ndarray) -> np.ndarray:
        return unpack(codes, 4)

    def rounded(self, ratios: np.ndarray) -> np.ndarray:
        return np.searchsorted(MIDDLES, ratios).astype(np.uint8)

    def stored(self, levels: np.ndarray) -> np.ndarray:
        return NUMBERS[(levels + np.float32(127)).astype(np.uint8)]

    def levels(self, q: np.ndarray) -> np.ndarray:
        return LEVELS[q]

    def nearest_level(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        return LEVELS[np.searchsorted(MIDDLES, values * inverse(scales))]
