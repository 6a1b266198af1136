"""int4_group32: groups of 32 values, each a float16 scale d and 16 bytes; value = (q - 8) * d.

The values and the layout are those of llama.cpp's Q4_0: the low nibbles of the 16 bytes are values 0..15, the high ones
16..31; d = (the signed value of largest magnitude) / -8; q = min(15, floor(x / d + 8.5)), with the scale before its
rounding to float16.
"""

import numpy as np

from coldpress.runtime.quantization._groups import GROUP, GroupFormat, pack, unpack


class Plugin(GroupFormat):
    LOWEST, HIGHEST = -8, 7
    CODE_BYTES = GROUP // 2
    GGUF_TYPE = "Q4_0"
    IS_COMPARED = True
    MAX_LOGIT_ERROR = 0.8  # small real models have at most half of it
    MAX_WEIGHT_ERROR = 0.3  # trained models have at most 0.1

    def pack_bits(self, q: np.ndarray) -> np.ndarray:
        return pack(q, 4)

    def unpack_bits(self, codes: np.ndarray) -> np.ndarray:
        return unpack(codes, 4)
