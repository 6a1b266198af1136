"""q5_0: llama.cpp's Q5_0, 5.5 bits a weight: groups of 32 values, each a float16 scale d; value = (q - 16) * d."""

import numpy as np

from coldpress.runtime.quantization._groups import GROUP, GroupFormat, pack, unpack


class Plugin(GroupFormat):
    """22 bytes per 32 values: the scale, 4 of fifth bits, 16 of low bits."""

    LOWEST, HIGHEST = -16, 15
    CODE_BYTES = GROUP // 8 * 5
    GGUF_TYPE = "Q5_0"
    MAX_LOGIT_ERROR = 0.5
    MAX_WEIGHT_ERROR = 0.1

    def pack_bits(self, q: np.ndarray) -> np.ndarray:
        return np.concatenate([np.packbits(q >> 4, axis=-1, bitorder="little"), pack(q & 15, 4)], axis=-1)

    def unpack_bits(self, codes: np.ndarray) -> np.ndarray:
        high = np.unpackbits(np.ascontiguousarray(codes[..., :4]), axis=-1, bitorder="little")
        return unpack(codes[..., 4:], 4) | high << 4
