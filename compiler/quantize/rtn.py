"""rtn: round to nearest. Every value takes the nearest code of its group, on its own; no calibration data.

The baseline that DIP 6.3 compares against; the formats' own `encode` is exactly this rounding. A slice is encoded on
its own, so the size of a block changes no byte.
"""

import numpy as np

from compiler.quantize._weights import Weights
from runtime._plugins import load
from schemas.families import FormatName

NEEDS_GRAM = False


def quantize(weights: Weights, format_name: FormatName) -> np.ndarray:
    """Codes of all slices, uint8 [n, nbytes(length)].

    Raises:
        ColdpressError: if a value or a scale is beyond float16.
    """
    kept = load("runtime.quantization", format_name)
    codes = np.empty((weights.count, kept.nbytes(weights.length)), np.uint8)
    for part, values in weights.blocks():
        codes[part] = kept.encode(values)
    return codes
