"""int3_group32: groups of 32 values, each a float16 scale d and 12 bytes; value = (q - 4) * d.

d = (the signed value of largest magnitude) / -4; q = min(7, floor(x / d + 4.5)), with the scale before its rounding to
float16, as in int4_group32. The first 8 bytes hold the low two bits of each q: value i in bits 2 (i // 8) of byte
i mod 8. The other 4 bytes hold the high bits: value i in bit i // 4 of byte 8 + i mod 4.
"""

import numpy as np

from coldpress.runtime.quantization._bits import pack, unpack
from coldpress.runtime.quantization._groups import GROUP, GroupFormat


class Plugin(GroupFormat):
    """Levels -4 to 3 in three bits."""

    LOWEST, HIGHEST = -4, 3
    CODE_BYTES = 3 * GROUP // 8
    IS_COMPARED = True
    MAX_LOGIT_ERROR = 1.0  # small real models have at most half of it
    MAX_WEIGHT_ERROR = 0.45  # trained models have at most 0.22

    def pack_bits(self, q: np.ndarray) -> np.ndarray:
        return pack(q, 3)

    def unpack_bits(self, codes: np.ndarray) -> np.ndarray:
        return unpack(codes, 3)
