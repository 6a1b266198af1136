"""Computes perplexity from blocks of text, with its standard error.

All blocks have one length, so the mean over tokens is the mean over blocks. Its standard error is that of a mean of
independent values, s / sqrt(n) with n - 1 in s; the delta method carries it through exp. It ignores that consecutive
blocks of one document are similar.
"""

import math

import numpy as np

LARGEST_NLL = 709.0
"""Nats whose exponential a float64 can hold."""
MOST_DIGITS = 6


def perplexity(nll: np.ndarray) -> tuple[float, float]:
    """Returns exp of the mean over blocks of `nll`, mean nats per token of each, float64 [num_blocks], and its standard
    error; for differences of two models, their ratio. The figure is infinite beyond float64, NaN for NaN; its error is
    NaN for a single block or a figure that is not finite."""
    mean = float(nll.mean())
    figure = math.exp(mean) if not mean > LARGEST_NLL else math.inf
    return figure, figure * standard_error(nll) if math.isfinite(figure) else math.nan


def deviation(of_block: np.ndarray) -> float:
    """Returns the standard deviation of [num_blocks]; NaN for a single block."""
    return float(of_block.std(ddof=1)) if of_block.size > 1 else math.nan


def standard_error(of_block: np.ndarray) -> float:
    """Returns the standard error of the mean of [num_blocks]; NaN for one block."""
    return deviation(of_block) / math.sqrt(of_block.size) if of_block.size > 1 else math.nan


def with_error(figure: float, error: float, digits: int) -> str:
    """Formats `27.55 ± 1.02`; the figure alone where no error is known. Shows `digits` decimals, or more where the
    error needs them for two significant digits."""
    if math.isnan(error):
        return f"{figure:.{digits}f}"
    shown = max(digits, min(MOST_DIGITS, 1 - math.floor(math.log10(error)))) if error else digits
    return f"{figure:.{shown}f} ± {error:.{shown}f}"
