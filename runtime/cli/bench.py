"""Measures decoding speed and flash traffic of an artifact on this machine, per selector and cache policy.

Each combination runs in a new session: the same prompt, several times, so that the first run finds a cold cache and the
others a warm one.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from coldpress.runtime.cache import show_choice
from coldpress.runtime.drafts import Drafting
from coldpress.runtime.generate.batch import generate_batch
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token, TokenSpreads, drafted, spreads
from coldpress.runtime.quantities import show_bytes, table
from coldpress.schemas.metrics import RunMetrics, share_of_hits


@dataclass(frozen=True)
class Row:
    """One combination. Traffic is per decoded token over all runs; speed is that of all sequences in the median run."""

    selector: str
    cache: str
    batch: int
    tokens_per_pass: float
    """Tokens of a sequence that a pass decodes: 1, and the drafts that were right."""
    tokens_per_s: float
    reads_per_token: float
    read_bytes_per_token: float
    hit_rate: float
    flash_s_per_token: float
    prefill_s: float
    dram_used_bytes: int
    dram_budget_bytes: int
    peak_rss_bytes: int
    per_token: TokenSpreads
    """Over the decoded tokens of all runs; with several sequences, over passes that decode one token of each."""


def measure(
    session: Session,
    prompt_ids: Sequence[int],
    num_tokens: int,
    num_runs: int,
    batch: int = 1,
    draft: Drafting | None = None,
) -> Row:
    """Decodes `num_tokens` per run after the first one. One sequence is greedy, with a `draft`, None for the plan's;
    several are drawn, so that they differ."""
    if batch == 1:
        one = [session.generate(prompt_ids, num_tokens + 1, ignore_eos=True, draft=draft) for _ in range(num_runs)]
        return _summarize(session, [(done.metrics, done.tokens[1:]) for done in one], batch)
    prompts, drawn = [prompt_ids] * batch, [Sampling(temperature=1.0, seed=seed) for seed in range(batch)]
    several = [
        generate_batch(session, prompts, num_tokens + 1, sampling=drawn, ignore_eos=True, draft=draft)
        for _ in range(num_runs)
    ]
    return _summarize(session, [(done.metrics, done.decoded) for done in several], batch)


def _summarize(session: Session, found: Sequence[tuple[RunMetrics, Sequence[Token]]], batch: int) -> Row:
    runs = [metrics for metrics, _ in found]
    every = [token for _, tokens in found for token in tokens]
    decoded, speculation = spreads(every), drafted(every)
    assert decoded, "num_tokens is at least 1, and runs go on behind the end of text"
    assert speculation, "as above"

    def total(name: str) -> float:
        return sum(getattr(metrics, name) for metrics in runs)

    tokens = total("num_tokens")
    return Row(
        selector=session.plan.method,
        cache=show_choice(session.plan.cache, session.plan.cache_options),
        batch=batch,
        tokens_per_pass=speculation.tokens_per_pass / batch,
        tokens_per_s=float(np.median([metrics.num_tokens / metrics.decode_s for metrics in runs])),
        reads_per_token=total("reads") / tokens,
        read_bytes_per_token=total("read_bytes") / tokens,
        hit_rate=share_of_hits(total("hits"), total("misses")),
        flash_s_per_token=total("flash_s") / tokens,
        prefill_s=float(np.median([metrics.prefill_s for metrics in runs])),
        dram_used_bytes=runs[-1].dram_used_bytes,
        dram_budget_bytes=runs[-1].dram_budget_bytes,
        peak_rss_bytes=runs[-1].peak_rss_bytes,
        per_token=decoded,
    )


def render(rows: list[Row]) -> str:
    head = (
        "selector",
        "cache",
        "batch",
        "tokens/pass",
        "tokens/s",
        "ms/pass p5",
        "median",
        "p95",
        "reads/token",
        "bytes/token",
        "hit rate",
        "flash ms/token",
        "DRAM used",
    )
    return table(
        [head]
        + [
            (
                row.selector,
                row.cache,
                str(row.batch),
                f"{row.tokens_per_pass:.2f}",
                f"{row.tokens_per_s:.1f}",
                *(f"{1000 * seconds:.2f}" for seconds in astuple(row.per_token.seconds)),
                f"{row.reads_per_token:.1f}",
                show_bytes(row.read_bytes_per_token),
                f"{row.hit_rate:.3f}",
                f"{1000 * row.flash_s_per_token:.2f}",
                show_bytes(row.dram_used_bytes),
            )
            for row in rows
        ]
    )
