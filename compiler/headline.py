"""Says what a build is worth in one sentence, for the report and for the comparison of two builds."""

import math

from coldpress.runtime.plugins import load
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.metrics import Metrics

SAME = 0.0005
"""Perplexities that differ by less than this share are called the same: the sentence shows tenths of a per cent."""


def headline(metrics: Metrics, device: str) -> str:
    """Returns model, device, DRAM, speed against the alternatives, and the cost in quality, in one sentence.

    Args:
        metrics: The build's figures.
        device: What to call the device.
    """
    return (
        f"{metrics.model} runs on {device} in {show_bytes(metrics.budget_bytes)} of DRAM at "
        f"{rate(metrics.modelled_tokens_per_s)} tokens/s (simulated); {_dense(metrics)} {_original(metrics)}; its "
        f"perplexity is {cost(metrics.ppl_ratio)} the original's."
    )


def _dense(metrics: Metrics) -> str:
    if metrics.dense is None:
        return "no dense run fits in so little DRAM, and"
    if load("coldpress.runtime.sparsity", Selector, metrics.method).is_whole:
        return "it is a dense run, and"
    return f"a dense run in the same DRAM gives {rate(metrics.dense.tokens_per_s)}, and"


def _original(metrics: Metrics) -> str:
    original = metrics.original
    if not original.fits:
        return f"the original does not fit: it needs {show_bytes(original.dram_bytes)}"
    return f"the original gives {rate(original.tokens_per_s)} with all of its {show_bytes(original.dram_bytes)} in DRAM"


def cost(ppl_ratio: float) -> str:
    """Returns how a perplexity compares with the original's, in words that stand before `the original's`."""
    if not math.isfinite(ppl_ratio):
        return "no number, unlike"
    if abs(ppl_ratio - 1) < SAME:
        return "the same as"
    return f"{100 * abs(ppl_ratio - 1):.1f} % {'above' if ppl_ratio > 1 else 'below'}"


def rate(per_s: float) -> str:
    """Returns tokens per second with as many digits as the figure deserves."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.2f}"
