"""rtn: rounds to nearest. Every value takes the nearest code of its group.

The baseline that DIP 6.3 compares against; the formats' own `encode` is exactly this rounding. Where the importance of
inputs is known, a group takes the scale, or the range, that loses the least output: the price of a weight's error is
the mean square of the weight's input. All values of a column share one input, so there the least squared error decides.
Slices are encoded independently, so the size of a block changes no byte.
"""

import numpy as np

from coldpress.compiler.rounding._weights import Algorithm, Weights
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName

GROUP = 32
"""Values of a slice that share a scale."""


class Plugin(Algorithm):
    def quantize(self, weights: Weights, format_name: FormatName) -> np.ndarray:
        """See `Algorithm`. Raises ColdpressError if a value or a scale is beyond float16."""
        codec = load("coldpress.runtime.quantization", Format, format_name)
        prices = weights.importance
        if prices is not None and weights.axis == "column":  # ranges are searched by equal prices anyhow
            prices = np.ones(weights.length, np.float32) if codec.IS_FINAL else None
        codes = np.empty((weights.count, codec.nbytes(weights.length)), np.uint8)
        for part, values in weights.blocks():
            codes[part] = codec.encode(values, prices)
        return codes
