"""Sums up a build in a sentence, for the summary, the report and the comparison of two builds: model, speed
and quality, whether it pays, and a warning where quality is clearly worse."""

import math
from collections.abc import Sequence

from coldpress.compiler.shared_settings import MAX_PPL_RATIO
from coldpress.runtime.artifact.contents import nbytes
from coldpress.runtime.plugins import load
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.device import UNCOMPUTED
from coldpress.schemas.families import FormatName
from coldpress.schemas.metrics import Metrics

SAME = 0.0005
"""Perplexities that differ by less than this share are called the same: the sentence shows tenths of a per cent."""
SELECTOR_LOSS = 1.01
"""Perplexity ratio of a selector, beside its format, from which on using more units is worth trying."""
WIDTH = 1024
"""Values whose bytes tell whether a format has eight bits or more."""


def headline(metrics: Metrics, device: str) -> str:
    """Returns model, device, DRAM, speed against the alternatives, and the cost in quality, in one sentence."""
    used_bytes = min(metrics.budget_bytes, metrics.whole_model_bytes)
    return (
        f"{metrics.model} runs on {device} in {show_bytes(used_bytes)} of DRAM at "
        f"{_speed(metrics)}; {_dense(metrics)} {_original(metrics)}; its "
        f"perplexity is {cost(metrics.ppl_ratio)} the original's."
    )


def _speed(metrics: Metrics) -> str:
    speed = f"{rate(metrics.modelled_tokens_per_s)} tokens/s"
    return f"{speed} (simulated)" if metrics.modelled_error is not None else f"no more than {speed} ({UNCOMPUTED})"


def at_most(metrics: Metrics, speed: str) -> str:
    return speed if metrics.modelled_error is not None else f"at most {speed}"


def _dense(metrics: Metrics) -> str:
    if metrics.dense is None:
        return "no dense run with attention in DRAM fits in so little, and"
    if load("coldpress.runtime.sparsity", Selector, metrics.method).is_whole:
        return "it is a dense run, and"
    return f"a dense run in the same DRAM gives {rate(metrics.dense.tokens_per_s)}, and"


def _original(metrics: Metrics) -> str:
    original = metrics.original
    if not original.fits:
        return f"the original does not fit: it needs {show_bytes(original.dram_bytes)}"
    return f"the original gives {rate(original.tokens_per_s)} with all of its {show_bytes(original.dram_bytes)} in DRAM"


def pays(metrics: Metrics) -> str:
    """Answers whether running from flash pays, against the same weights with everything in DRAM."""
    if not metrics.flash_bytes_per_token:
        return "nothing is read from flash: the DRAM holds the whole model"
    whole = next((each for each in metrics.in_dram if each.format == metrics.format), metrics.original)
    if not whole.fits:
        return f"yes: all in DRAM, {whole.format} needs {show_bytes(whole.dram_bytes)}, more than the device has"
    more, gain = whole.dram_bytes - metrics.budget_bytes, whole.tokens_per_s / metrics.modelled_tokens_per_s
    if more <= 0:
        return f"no: {whole.format} fits this budget without reading flash, and is {gain:.1f} times as fast"
    return (
        f"no, if {show_bytes(more)} more DRAM can be spared: {whole.format} then reads nothing from flash and is "
        f"{gain:.1f} times as fast (simulated)"
    )


def warning(metrics: Metrics) -> str:
    """Returns a line that says that quality is clearly worse, with what to change; empty if it is kept."""
    if metrics.ppl_ratio <= MAX_PPL_RATIO:
        return ""
    is_whole = load("coldpress.runtime.sparsity", Selector, metrics.method).is_whole
    found = remedies(metrics.format, metrics.ppl_ratio, metrics.ppl_dense / metrics.ppl_source, is_whole=is_whole)
    tries = f"; try {', or '.join(found)}" if found else ""
    return f"warning: quality is clearly worse: perplexity is {cost(metrics.ppl_ratio)} the original's{tries}"


def remedies(
    format_name: FormatName, ppl_ratio: float, of_format: float, *, is_whole: bool, most: float = MAX_PPL_RATIO
) -> Sequence[str]:
    """Returns the change that would keep more quality: a wider format if the format loses it, else more units.
    `of_format` is the perplexity ratio with every unit used, which `is_whole` says every token does anyway."""
    found: list[str] = []
    if not of_format <= most and nbytes(format_name, WIDTH) < WIDTH:
        found.append("format=int8_group32")
    if not is_whole and not ppl_ratio <= SELECTOR_LOSS * of_format:
        found += ["a higher density or dram_budget", "distill=true", "method=dense"]
    return found


def cost(ppl_ratio: float) -> str:
    """Returns how a perplexity compares with the original's, in words that stand before `the original's`."""
    if not math.isfinite(ppl_ratio):
        return "no number, unlike"
    if abs(ppl_ratio - 1) < SAME:
        return "the same as"
    return f"{100 * abs(ppl_ratio - 1):.1f} % {'above' if ppl_ratio > 1 else 'below'}"


def rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.2f}"
