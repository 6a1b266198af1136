"""int8_group32: groups of 32 values, each a float16 scale d and 32 signed bytes q; value = q * d.

The values and the layout are those of llama.cpp's Q8_0: d = (largest magnitude) / 127, q = x / d rounded half away from
zero, with the scale before its rounding to float16.
"""

import numpy as np

from coldpress.runtime.quantization._groups import GROUP, GroupFormat


class Plugin(GroupFormat):
    LOWEST, HIGHEST = -127, 127
    CODE_BYTES = GROUP
    GGUF_TYPE = "Q8_0"
    IS_COMPARED = True
    MAX_LOGIT_ERROR = 0.1  # small real models have at most a fifth of it
    MAX_WEIGHT_ERROR = 0.02  # trained models have at most 0.006
    IS_SEARCHED = False

    def group_scale(self, values: np.ndarray) -> np.ndarray:
        return np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)

    def rounded(self, ratios: np.ndarray) -> np.ndarray:
        """Rounds half away from zero, as llama.cpp does."""
        whole = np.trunc(ratios)  # ratios - whole is exact; trunc(ratios + 0.5) would be wrong just below one half
        return self.stored(whole + np.where(np.abs(ratios - whole) >= 0.5, np.sign(ratios), np.float32(0)))

    def stored(self, levels: np.ndarray) -> np.ndarray:
        return levels.astype(np.int8).view(np.uint8)

    def levels(self, q: np.ndarray) -> np.ndarray:
        return q.view(np.int8).astype(np.float32)

    def pack_bits(self, q: np.ndarray) -> np.ndarray:
        return q

    def unpack_bits(self, codes: np.ndarray) -> np.ndarray:
        return codes
