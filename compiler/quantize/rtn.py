"""rtn: round to nearest. Every value takes the nearest code of its group, on its own; no calibration data.

The baseline that DIP 6.3 compares against; the formats' own `encode` is exactly this rounding.
"""

import numpy as np

from runtime._plugins import load
from schemas.families import FormatName


def quantize(values: np.ndarray, format_name: FormatName) -> np.ndarray:
    """Codes of slices: float32 [n, length] -> uint8 [n, nbytes(length)]; each slice on its own.

    Raises:
        ColdpressError: if a value or a scale is beyond float16.
    """
    return load("runtime.quantization", format_name).encode(values)
