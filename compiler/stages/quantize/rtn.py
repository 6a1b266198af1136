"""rtn: round to nearest. Every value takes the nearest code of its group, on its own; no calibration data.

The baseline that DIP 6.3 compares against; the formats' own `encode` is exactly this rounding. Where the importance of
inputs is known, a group's scale is the one that loses the least output: an error of a weight is priced by the mean
square of the input that it meets. All values of a column meet the same one, so there the least squared error counts. A
slice is encoded on its own, so the size of a block changes no byte.
"""

import numpy as np

from coldpress.compiler.stages.quantize._scales import best_scales
from coldpress.compiler.stages.quantize._weights import Algorithm, Weights
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName

GROUP = 32
"""Values of a slice that share a scale."""


class Plugin(Algorithm):
    """Round to nearest."""

    def quantize(self, weights: Weights, format_name: FormatName) -> np.ndarray:
        """Codes of all slices, uint8 [n, nbytes(length)].

        Raises:
            ColdpressError: if a value or a scale is beyond float16.
        """
        kept = load("coldpress.runtime.quantization", Format, format_name)
        prices = None if weights.importance is None or not kept.SCALE_SIGNS else _prices(weights, weights.importance)
        codes = np.empty((weights.count, kept.nbytes(weights.length)), np.uint8)
        for part, values in weights.blocks():
            codes[part] = kept.encode(values) if prices is None else _encode_by(prices, values, kept)
        return codes


def _prices(weights: Weights, importance: np.ndarray) -> np.ndarray:
    """Of an error of each value of a slice, float32 [1, groups, 32], 0 behind the slice's end."""
    prices = np.zeros((1, -(-weights.length // GROUP), GROUP), np.float32)
    prices.reshape(-1)[: weights.length] = 1 if weights.axis == "column" else importance
    return prices


def _encode_by(prices: np.ndarray, values: np.ndarray, kept: Format) -> np.ndarray:
    """Codes uint8 [n, nbytes(length)] of float32 [n, length]."""
    count, length = values.shape
    whole = np.zeros((count, prices.shape[1], GROUP), np.float32)
    whole.reshape(count, -1)[:, :length] = values
    each = np.broadcast_to(prices, whole.shape).reshape(-1, GROUP)
    scales = best_scales(whole.reshape(-1, GROUP), each, kept).reshape(count, -1)
    return kept.pack(kept.nearest(values, np.repeat(scales, GROUP, axis=1)[:, :length]), scales)
