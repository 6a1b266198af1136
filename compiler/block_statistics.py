"""Perplexity from blocks of text, with its standard error: what one figure from a sample of text is worth.

Blocks are of one length, so that the mean over tokens is the mean over blocks. Its standard error is that of a mean of
independent values, s / sqrt(n) with n - 1 in s; the delta method carries it through exp. Blocks that follow each other
in one document are alike, which this does not see.
"""

import math

import numpy as np

LARGEST_NLL = 709.0
"""Nats whose exponential a float64 can hold."""
MOST_DIGITS = 6


def perplexity(nll: np.ndarray) -> tuple[float, float]:
    """exp of the mean over blocks, and its standard error; given differences of two models, the ratio of theirs.

    Args:
        nll: Mean nats per token of each block, float64 [num_blocks].

    Returns:
        The figure: infinite where it is beyond float64, NaN for NaN. Its error: NaN where one block says nothing of how
        blocks differ, or the figure is not finite.
    """
    mean = float(nll.mean())
    figure = math.exp(mean) if not mean > LARGEST_NLL else math.inf
    return figure, figure * standard_error(nll) if math.isfinite(figure) else math.nan


def deviation(of_block: np.ndarray) -> float:
    """Standard deviation of [num_blocks]; NaN for one block, which says nothing about how blocks differ."""
    return float(of_block.std(ddof=1)) if of_block.size > 1 else math.nan


def standard_error(of_block: np.ndarray) -> float:
    """Standard error of the mean of [num_blocks]; NaN for one block."""
    return deviation(of_block) / math.sqrt(of_block.size) if of_block.size > 1 else math.nan


def with_error(figure: float, error: float, digits: int) -> str:
    """`27.55 ± 1.02`; the figure alone where no error is known.

    There are `digits` behind the point, and more where two of the error's own would not be seen.
    """
    if math.isnan(error):
        return f"{figure:.{digits}f}"
    shown = max(digits, min(MOST_DIGITS, 1 - math.floor(math.log10(error)))) if error else digits
    return f"{figure:.{shown}f} ± {error:.{shown}f}"
