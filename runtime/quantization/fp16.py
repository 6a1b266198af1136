"""fp16: IEEE half precision, little-endian, two bytes per value; a slice has no groups and no padding."""

import numpy as np

from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._groups import decode_blocks, encode_blocks, float16


class Plugin(Format):
    GGUF_TYPE = "F16"
    IS_COMPARED = True
    MAX_LOGIT_ERROR = 0.01  # small real models have at most a fifth of it
    MAX_WEIGHT_ERROR = 0.001  # trained models have at most 0.0002

    def nbytes(self, length: int) -> int:
        return 2 * length

    def encode(self, values: np.ndarray, prices: np.ndarray | None = None) -> np.ndarray:
        """Rounds to nearest even; raises `ColdpressError` if a value is beyond float16."""
        return encode_blocks(values, self.nbytes(values.shape[1]), _encode)

    def decode(self, codes: np.ndarray, length: int) -> np.ndarray:
        return decode_blocks(codes, length, self.nbytes(length), _decode)

    def finite(self, codes: np.ndarray) -> bool:
        """Tells whether no exponent has all bits set."""
        magnitudes = np.ascontiguousarray(codes).view("<u2") & 0x7FFF
        return bool(magnitudes.max(initial=0) < 0x7C00)


def _encode(values: np.ndarray, codes: np.ndarray) -> None:
    codes[...] = np.ascontiguousarray(float16(values, "fp16")).view(np.uint8)


def _decode(codes: np.ndarray, values: np.ndarray) -> None:
    values[...] = np.ascontiguousarray(codes).view("<f2")
