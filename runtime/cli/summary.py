"""Summarizes the cost of a run, as a table for people and as JSON-ready data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from coldpress.runtime.generate.batch import Batch
from coldpress.runtime.generate.statistics import Drafted, Spread, Token, TokenSpreads, drafted, spreads
from coldpress.runtime.quantities import show_bytes, table
from coldpress.runtime.signals import Decided
from coldpress.schemas.metrics import RunMetrics


def as_data(tokens: Sequence[Token]) -> dict[str, Any]:
    """Returns every token of a run, and the spreads and drafts of its decoded tokens (all but the first)."""
    decoded, speculation = spreads(tokens[1:]), drafted(tokens[1:])
    return {
        "tokens": [asdict(token) for token in tokens],
        "per_token": decoded and asdict(decoded),
        "speculation": speculation and asdict(speculation),
    }


def render(metrics: RunMetrics, run_tokens: Sequence[Token] = ()) -> str:
    decoded, speculation = spreads(run_tokens[1:]), drafted(run_tokens[1:])
    tokens, used = max(1, metrics.num_tokens), metrics.dram_used_bytes
    speed = f"{metrics.num_tokens / metrics.decode_s:.1f}" if metrics.decode_s else "-"
    rows = [
        ("decoded tokens", str(metrics.num_tokens)),
        ("tokens/s", speed),
        ("first token", _seconds(metrics.first_token_s)),
        ("flash read per token", show_bytes(metrics.read_bytes / tokens)),
        ("reads per token", f"{metrics.reads / tokens:.1f}"),
        *(_spread_rows(decoded) if decoded else ()),
        *(_draft_rows(speculation) if speculation and speculation.drafted else ()),
        *(_modelled_rows(metrics, tokens) if math.isfinite(metrics.modelled_s) else ()),
        ("hit rate", f"{metrics.hit_rate:.3f}"),
        ("flash read by the prefill", show_bytes(metrics.prefill_read_bytes)),
        ("DRAM used, of the budget", f"{show_bytes(used)} of {show_bytes(metrics.dram_budget_bytes)}"),
        ("the whole model", whole_model(metrics.whole_model_bytes, metrics.dram_budget_bytes)),
        ("process, at its peak", process(used, metrics.peak_rss_bytes - used)),
    ]
    return table(rows)


def render_decided(found: Decided) -> str:
    return table(
        [
            ("tokens/s", f"{1 / found.token_s:.1f}"),
            ("flash read per token", show_bytes(found.read_bytes)),
            ("reads per token", f"{found.reads:.1f}"),
            ("hit rate", f"{found.hit_rate:.3f}"),
        ]
    )


def whole_model(whole_bytes: int, budget_bytes: int) -> str:
    fits = f"fits in {whole_bytes:,} bytes"
    if whole_bytes <= budget_bytes:
        return f"{fits}: flash is not needed"
    return f"{fits}, {whole_bytes - budget_bytes:,} more than the budget"


def process(used_bytes: int, other_bytes: int) -> str:
    """Returns a process's memory as the sum of the budget's part and the rest, which no budget limits."""
    whole, used, other = map(show_bytes, (used_bytes + other_bytes, used_bytes, max(0, other_bytes)))
    return f"{whole} = {used} of the budget + {other} Python and libraries"


def batch_as_data(done: Batch) -> dict[str, Any]:
    decoded = spreads(done.decoded)
    return {"metrics": done.metrics.model_dump(mode="json"), "per_pass": decoded and asdict(decoded)}


def render_batch(done: Batch) -> str:
    decoded, metrics = spreads(done.decoded), done.metrics
    passes = sum(token.leads for token in done.decoded)
    mean = f", {metrics.num_tokens / passes:.2f} tokens each" if passes else ""
    rows = [("sequences", str(len(done.sequences))), ("passes", f"{passes}{mean}")]
    if decoded:
        seconds = decoded.seconds
        rows.append(("a pass: p5, median, p95", ", ".join(map(ms, (seconds.p5, seconds.median, seconds.p95)))))
    return table(rows) + "\n" + render(metrics)


def _modelled_rows(metrics: RunMetrics, tokens: int) -> list[tuple[str, str]]:
    flash_s, dram_s = metrics.modelled_flash_s / tokens, metrics.modelled_dram_s / tokens
    return [("modelled flash, computing", f"{ms(flash_s)}, {ms(dram_s)}")]


def _draft_rows(found: Drafted) -> list[tuple[str, str]]:
    return [
        ("drafts accepted", f"{found.accepted} of {found.drafted} ({100 * found.acceptance:.0f} %)"),
        ("tokens per pass", f"{found.tokens_per_pass:.2f}"),
    ]


def _spread_rows(decoded: TokenSpreads) -> list[tuple[str, str]]:
    def row(label: str, spread: Spread, show: Callable[[float], str]) -> tuple[str, str]:
        return f"{label}: p5, median, p95", ", ".join(show(value) for value in (spread.p5, spread.median, spread.p95))

    return [
        row("a token", decoded.seconds, ms),
        row("waiting for flash", decoded.flash_s, ms),
        row("reads", decoded.reads, lambda reads: f"{reads:.0f}"),
        row("hit rate", decoded.hit_rate, lambda rate: f"{rate:.3f}"),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else ms(seconds)


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms"
