"""rtn: rounds to nearest. Every value takes the nearest code of its group; no calibration data.

The baseline that DIP 6.3 compares against; the formats' own `encode` is exactly this rounding. Where the importance of
inputs is known, a group takes the scale that loses the least output: the price of a weight's error is the mean square
of the weight's input. All values of a column share one input, so there the least squared error decides. Slices are
encoded independently, so the size of a block changes no byte.
"""

import numpy as np

from coldpress.compiler.rounding._scales import best_scales
from coldpress.compiler.rounding._weights import Algorithm, Weights
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._ranges import RangeFormat
from coldpress.schemas.families import FormatName

GROUP = 32
"""Values of a slice that share a scale."""


class Plugin(Algorithm):
    def quantize(self, weights: Weights, format_name: FormatName) -> np.ndarray:
        """See `Algorithm`.

        Raises:
            ColdpressError: if a value or a scale is beyond float16.
        """
        codec = load("coldpress.runtime.quantization", Format, format_name)
        if isinstance(codec, RangeFormat):
            return _in_ranges(weights, codec)
        prices = None if weights.importance is None or not codec.SCALE_SIGNS else _prices(weights, weights.importance)
        codes = np.empty((weights.count, codec.nbytes(weights.length)), np.uint8)
        for part, values in weights.blocks():
            codes[part] = codec.encode(values) if prices is None else _encode_by(prices, values, codec)
        return codes


def _in_ranges(weights: Weights, codec: RangeFormat) -> np.ndarray:
    prices = None if weights.axis == "column" else weights.importance
    codes = np.empty((weights.count, codec.nbytes(weights.length)), np.uint8)
    for part, values in weights.blocks():
        codes[part] = codec.encode(values, prices)
    return codes


def _prices(weights: Weights, importance: np.ndarray) -> np.ndarray:
    """Returns the price of an error of each value of a slice, float32 [1, groups, 32], 0 beyond the slice's end."""
    prices = np.zeros((1, -(-weights.length // GROUP), GROUP), np.float32)
    prices.reshape(-1)[: weights.length] = 1 if weights.axis == "column" else importance
    return prices


def _encode_by(prices: np.ndarray, values: np.ndarray, codec: Format) -> np.ndarray:
    """Encodes float32 [n, length] as codes uint8 [n, nbytes(length)]."""
    count, length = values.shape
    whole = np.zeros((count, prices.shape[1], GROUP), np.float32)
    whole.reshape(count, -1)[:, :length] = values
    each = np.broadcast_to(prices, whole.shape).reshape(-1, GROUP)
    scales = best_scales(whole.reshape(-1, GROUP), each, codec).reshape(count, -1)
    return codec.pack(codec.nearest(values, np.repeat(scales, GROUP, axis=1)[:, :length]), scales)
