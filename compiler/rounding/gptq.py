"""gptq: rounds a matrix input by input and lets later inputs correct the error (GPTQ, Algorithm 1).

With X the calibration inputs and H = X Xᵀ from `gram`, the loss is tr(D H Dᵀ), where D is the change by rounding.
Inputs are processed in natural order, in blocks; the rows of the upper Cholesky factor U of H⁻¹ spread the correctable
part of an error over later inputs. Scales belong to the formats' groups of 32 along a slice: a row's group gets its
scale when its first input is reached, a column's groups when the column is, from the corrected values at that time. The
scale with the least immediate loss is taken: an error at input j costs its square over U_jj² (Eq. 2). Matrices without
calibrated inputs (embeddings, the head, experts) are rounded to nearest, by importance where it is known.
"""

import logging
from collections.abc import Callable

import numpy as np
from scipy.linalg import get_lapack_funcs

from coldpress.compiler.rounding import rtn
from coldpress.compiler.rounding._weights import Algorithm, Weights
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._groups import inverse
from coldpress.runtime.quantization._ranges import RangeFormat
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FormatName

GROUP = rtn.GROUP
LOG = logging.getLogger(__name__)
BLOCK = 128
"""Inputs per block: errors inside a block reach the rest of the matrix when the block is done (GPTQ, step 2)."""
DAMPING = 0.01
"""Share of the mean diagonal of H that is added to it (GPTQ, step 3)."""
MOST_DAMPING = 1.0


class Plugin(Algorithm):
    NEEDS_GRAM = True

    def quantize(self, weights: Weights, format_name: FormatName) -> np.ndarray:
        """See `Algorithm`; also raises ColdpressError if the Gram matrix does not fit the inputs."""
        if weights.gram is None:
            return rtn.Plugin().quantize(weights, format_name)
        codec = load("coldpress.runtime.quantization", Format, format_name)
        whole = np.concatenate([values for _, values in weights.blocks()])
        by_input = np.ascontiguousarray(whole.T) if weights.axis == "row" else whole
        factor = error_factor(weights.gram)
        if isinstance(codec, RangeFormat):
            return (_rows_in_ranges if weights.axis == "row" else _columns_in_ranges)(by_input, factor, codec)
        rounded, scales = _round(by_input, factor, weights.axis == "row", codec)
        if weights.axis == "row":
            rounded, scales = np.ascontiguousarray(rounded.T), np.ascontiguousarray(scales.T)
        return codec.pack(rounded, scales)


def error_factor(gram: np.ndarray) -> np.ndarray:
    """Returns the upper triangular U with Uᵀ U = (H + damping)⁻¹, float32 [n, n]. With A upper triangular and H = A Aᵀ
    (Cholesky's factorization in reverse order of inputs), U is A⁻¹. An input that never occurred affects no other.
    Raises ColdpressError if H is not positive definite with any damping."""
    diagonal = np.diag(gram)
    mean = float(diagonal.mean(dtype=np.float64))
    damping = DAMPING
    while damping <= MOST_DAMPING:
        backwards = np.array(gram[::-1, ::-1], np.float32, order="F")
        index = np.arange(len(gram))
        backwards[index, index] += np.where(diagonal[::-1] > 0, np.float32(damping * mean), np.float32(1))
        factorize, invert = get_lapack_funcs(("potrf", "trtri"), (backwards,))
        lower, wrong = factorize(backwards, lower=1, clean=1, overwrite_a=1)
        if not wrong:
            inverse, _ = invert(lower, lower=1, overwrite_c=1)
            return np.ascontiguousarray(inverse[::-1, ::-1])
        damping *= 10
        LOG.info("quantize: a Gram matrix is not positive definite in float32; it is damped by %g instead", damping)
    raise ColdpressError(
        "the Gram matrix of its inputs is not positive definite, expected a sum of x xᵀ; delete gram.json and its "
        "folder, then build again"
    )


def _round(values: np.ndarray, factor: np.ndarray, along_inputs: bool, codec: Format) -> tuple[np.ndarray, np.ndarray]:
    """Returns (decoded values float32 [inputs, outputs]; scales [groups, outputs] along inputs, else [inputs, groups]),
    and overwrites `values`, float32 [inputs, outputs]. With `along_inputs` a group is 32 inputs of one output, else 32
    outputs of one input."""
    scales: list[np.ndarray] = []
    prices = 1 / np.square(np.diag(factor))

    def nearest(at: int) -> np.ndarray:
        if along_inputs and at % GROUP == 0:
            group = slice(at, at + GROUP)
            scales.append(codec.scales(np.ascontiguousarray(values[group].T), prices[None, group]))
        elif not along_inputs:
            scales.append(_scales_of_slice(values[at], codec))
        scale = scales[-1] if along_inputs else np.repeat(scales[-1], GROUP)[: values.shape[1]]
        return codec.nearest(values[at], scale)

    return corrected(values, factor, nearest), np.stack(scales)


def _rows_in_ranges(values: np.ndarray, factor: np.ndarray, codec: RangeFormat) -> np.ndarray:
    """Returns codes uint8 [outputs, nbytes(inputs)], and overwrites `values`, float32 [inputs, outputs]. A block of
    inputs gets its ranges when its first input is reached."""
    inputs, outputs = values.shape
    padded = -(-inputs // codec.BLOCK) * codec.BLOCK
    numbers, ranges = np.zeros((padded, outputs), np.uint8), []
    prices = np.zeros(padded, np.float32)
    prices[:inputs] = 1 / np.square(np.diag(factor))

    def nearest(at: int) -> np.ndarray:
        start, inside = at // codec.BLOCK * codec.BLOCK, at % codec.BLOCK
        if inside == 0:
            block = np.zeros((outputs, codec.BLOCK), np.float32)
            block[:, : min(codec.BLOCK, inputs - start)] = values[start : start + codec.BLOCK].T
            ranges.append(codec.ranges(block, prices[None, start : start + codec.BLOCK]))
        steps, starts = (one[:, inside // codec.GROUP] for one in (ranges[-1].steps, ranges[-1].starts))
        numbers[at] = np.clip(np.rint((values[at] - starts) * inverse(steps)), 0, codec.HIGHEST)
        return numbers[at] * steps + starts

    corrected(values, factor, nearest)
    blocks = np.ascontiguousarray(numbers.T).reshape(-1, codec.BLOCK)
    headers = np.stack([one.header for one in ranges], axis=1)
    return codec.join(blocks, headers.reshape(len(blocks), -1)).reshape(outputs, -1)


def _columns_in_ranges(values: np.ndarray, factor: np.ndarray, codec: RangeFormat) -> np.ndarray:
    """Returns codes uint8 [inputs, nbytes(outputs)], and overwrites `values`, float32 [inputs, outputs]. The ranges are
    those of the least squared error, since all values of a column have one input."""
    codes = np.empty((len(values), codec.nbytes(values.shape[1])), np.uint8)

    def nearest(at: int) -> np.ndarray:
        codes[at] = codec.encode(values[at : at + 1])[0]
        return codec.decode(codes[at : at + 1], values.shape[1])[0]

    corrected(values, factor, nearest)
    return codes


def corrected(values: np.ndarray, factor: np.ndarray, nearest: Callable[[int], np.ndarray]) -> np.ndarray:
    """Rounds input by input, and lets later inputs correct the error; returns the rounded values. `values`, float32
    [inputs, outputs], is overwritten by the values that were rounded; `nearest` rounds one row of it as it is then,
    given its number: float32 [outputs]."""
    inputs, outputs = values.shape
    rounded = np.empty_like(values)
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        errors = np.empty((stop - start, outputs), np.float32)
        for at in range(start, stop):
            rounded[at] = nearest(at)
            errors[at - start] = (values[at] - rounded[at]) / factor[at, at]
            values[at + 1 : stop] -= factor[at, at + 1 : stop, None] * errors[at - start]
        values[stop:] -= factor[start:stop, stop:].T @ errors
    return rounded


def _scales_of_slice(values: np.ndarray, codec: Format) -> np.ndarray:
    """Returns scales float32 [groups] of a slice float32 [length]; a partial last group is padded with zeros."""
    whole, prices = np.zeros((2, -(-values.size // GROUP) * GROUP), np.float32)
    whole[: values.size], prices[: values.size] = values, 1
    return codec.scales(whole.reshape(-1, GROUP), prices.reshape(-1, GROUP))
