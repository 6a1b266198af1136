"""What a run took, as a table for people and as JSON-ready data."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from runtime.quantities import show_bytes, table
from runtime.token_statistics import Spread, Token, TokenSpreads, spreads
from schemas.metrics import RunMetrics


def as_data(tokens: Sequence[Token]) -> dict[str, Any]:
    """The record of every token of a run, and the spreads of its decoded ones, which the first is not."""
    decoded = spreads(tokens[1:])
    return {"tokens": [asdict(token) for token in tokens], "per_token": decoded and asdict(decoded)}


def render(metrics: RunMetrics, decoded: TokenSpreads | None = None) -> str:
    """The table for people, with the spreads of decoded tokens where there are any."""
    tokens = max(1, metrics.num_tokens)
    speed = f"{metrics.num_tokens / metrics.decode_s:.1f}" if metrics.decode_s else "-"
    rows = [
        ("decoded tokens", str(metrics.num_tokens)),
        ("tokens/s", speed),
        ("first token", f"{metrics.first_token_s:.2f} s"),
        ("flash read per token", show_bytes(metrics.read_bytes / tokens)),
        ("reads per token", f"{metrics.reads / tokens:.1f}"),
        *(_spread_rows(decoded) if decoded else ()),
        ("modelled flash, memory", f"{ms(metrics.modelled_flash_s / tokens)}, {ms(metrics.modelled_dram_s / tokens)}"),
        ("hit rate", f"{metrics.hit_rate:.3f}"),
        ("flash read by the prefill", show_bytes(metrics.prefill_read_bytes)),
        (
            "DRAM used, of the budget",
            f"{show_bytes(metrics.dram_used_bytes)} of {show_bytes(metrics.dram_budget_bytes)}",
        ),
        ("peak RSS of the process", show_bytes(metrics.peak_rss_bytes)),
    ]
    return table(rows)


def _spread_rows(decoded: TokenSpreads) -> list[tuple[str, str]]:
    def row(label: str, spread: Spread, show: Callable[[float], str]) -> tuple[str, str]:
        return f"{label}: p5, median, p95", ", ".join(show(value) for value in (spread.p5, spread.median, spread.p95))

    return [
        row("a token", decoded.seconds, ms),
        row("of it, for flash", decoded.flash_s, ms),
        row("its reads", decoded.reads, lambda reads: f"{reads:.0f}"),
        row("its hit rate", decoded.hit_rate, lambda rate: f"{rate:.3f}"),
    ]


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{1000 * seconds:.3f} ms"
