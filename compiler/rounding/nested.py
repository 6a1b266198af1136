"""nested: chooses codes that are good by the coarse plane alone and by both (runtime/quantization/_planes.py).

GPTQ twice. First the high bits: each input's error by the coarse plane alone is corrected by later inputs, so that the
coarse plane multiplies well. Then the low bits, within what the high bits leave open, so that both planes together do,
too. A correction that leaves the weight far behind would leave the low bits no good choice, so the high bits follow it
by half (FOLLOWED). Scales are those of rounding to nearest.

Any-Precision LLM grows finer codes from coarse ones, too, with clusters for each row instead of scales for groups.
"""

import numpy as np

from coldpress.compiler.rounding import gptq
from coldpress.compiler.rounding._weights import Algorithm, Weights
from coldpress.runtime.quantization._groups import GROUP, padded
from coldpress.runtime.quantization._planes import PlanesFormat, planes_of
from coldpress.schemas.families import FormatName

FOLLOWED = 0.5
"""Share of GPTQ's correction that the high bits follow: with 1, both planes together are twice as far from the source
(docs/experiments/planes.md)."""


class Plugin(Algorithm):
    """Codes good in both planes; in a format without planes, GPTQ's."""

    NEEDS_GRAM = True
    IN_PLANES = True

    def quantize(self, weights: Weights, format_name: FormatName) -> np.ndarray:
        """See `Algorithm`.

        Raises:
            ColdpressError: if a scale is beyond float16, or the Gram matrix does not fit the inputs.
        """
        planes = planes_of(format_name)
        if planes is None or weights.gram is None:
            return gptq.Plugin().quantize(weights, format_name)
        return nested_codes(weights, planes)


def nested_codes(weights: Weights, planes: PlanesFormat) -> np.ndarray:
    """Returns codes of the plain format, uint8 [n, nbytes(length)]; reads the weights, which have their Gram matrix,
    whole.

    Raises:
        ColdpressError: if a scale is beyond float16, or the Gram matrix does not fit the inputs.
    """
    assert weights.gram is not None
    values = np.concatenate([block for _, block in weights.blocks()])
    scales = planes.whole.scales(padded(values).reshape(-1, GROUP)).reshape(len(values), -1)
    spread, factor = np.repeat(scales, GROUP, axis=1)[:, : weights.length], gptq.error_factor(weights.gram)
    if weights.axis == "row":
        values = _round(values.T, spread.T, factor, planes).T
    else:
        values = _round(values, spread, factor, planes)
    return planes.whole.pack(np.ascontiguousarray(values), scales)


def _round(values: np.ndarray, scales: np.ndarray, factor: np.ndarray, planes: PlanesFormat) -> np.ndarray:
    """Returns values of the plain format, float32 [inputs, outputs]; `scales` are those of each value."""
    step, middle, zero = 1 << planes.LOW_BITS, planes.MIDDLE, planes.zero
    lowest, highest = planes.whole.LOWEST + zero, planes.whole.HIGHEST + zero
    inverse = np.divide(1, scales, out=np.zeros(scales.shape, np.float32), where=scales != 0)
    coarse = np.array(values, np.float32)
    firsts = np.empty_like(coarse)  # the least number that the high bits leave open

    def middle_of(at: int) -> np.ndarray:
        followed = values[at] + FOLLOWED * (coarse[at] - values[at])
        places = (followed * inverse[at] + zero - (step - 1) / 2) / step
        firsts[at] = step * np.clip(np.rint(places), 0, highest // step)
        return (firsts[at] + middle - zero) * scales[at]

    gptq.corrected(coarse, factor, middle_of)
    both = np.array(values, np.float32)

    def whole_of(at: int) -> np.ndarray:
        least = np.maximum(firsts[at], lowest)
        number = np.clip(np.rint(both[at] * inverse[at] + zero), least, firsts[at] + step - 1)
        return (number - zero) * scales[at]

    return gptq.corrected(both, factor, whole_of)
