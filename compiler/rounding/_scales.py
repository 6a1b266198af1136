"""Finds group scales with the least weighted error, where a format's rule only fits the largest value.

Tries multiples of that rule's scale, with either sign where a format's levels are not symmetric, and takes the smallest
sum of price times squared error; then the least-squares scale for the levels found, if that is better still (the search
of llama.cpp's quantization with importance, ggml-quants.c). The rule's own scale is among those tried.
"""

import numpy as np

from coldpress.runtime.quantization import Format

MULTIPLES = np.linspace(0.45, 1.1, 12, dtype=np.float32)
"""Multiples below 1 clip the largest values, in exchange for finer steps."""


def best_scales(values: np.ndarray, prices: np.ndarray, codec: Format) -> np.ndarray:
    """Returns the best scale of each group of `values`, float32 [n, at most 32], float32 [n] as it will be stored;
    `prices` are those of a squared error of each value, at least 0, float32 [n, the same] or [1, the same].

    Raises:
        ColdpressError: if a scale is beyond float16.
    """
    plain = codec.scales(values)
    best, lost = plain, _lost(values, plain, prices, codec)
    with np.errstate(over="ignore", invalid="ignore"):  # a scale beyond float16 costs NaN or infinity: never chosen
        for sign in codec.SCALE_SIGNS:
            for multiple in MULTIPLES:
                best, lost = _better(values, _stored(plain * (sign * multiple)), prices, codec, best, lost)
        if codec.SCALE_SIGNS:
            best, lost = _better(values, _least_squares(values, best, prices, codec), prices, codec, best, lost)
    return best


def _better(
    values: np.ndarray, tried: np.ndarray, prices: np.ndarray, codec: Format, best: np.ndarray, lost: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    found = _lost(values, tried, prices, codec)
    is_better = found < lost
    return np.where(is_better, tried, best), np.where(is_better, found, lost)


def _lost(values: np.ndarray, scales: np.ndarray, prices: np.ndarray, codec: Format) -> np.ndarray:
    return (prices * np.square(values - codec.nearest(values, scales[:, None]))).sum(axis=1)


def _least_squares(values: np.ndarray, scales: np.ndarray, prices: np.ndarray, codec: Format) -> np.ndarray:
    """Returns the best scales for the levels that `scales` give; unchanged scales where all levels are 0."""
    rounded = codec.nearest(values, scales[:, None])
    levels = np.divide(rounded, scales[:, None], out=np.zeros_like(rounded), where=scales[:, None] != 0)
    weight = (prices * np.square(levels)).sum(axis=1)
    return _stored(np.divide((prices * levels * values).sum(axis=1), weight, out=scales.copy(), where=weight > 0))


def _stored(scales: np.ndarray) -> np.ndarray:
    return scales.astype(np.float16).astype(np.float32)
