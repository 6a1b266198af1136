"""Shows two builds on one page: what each is worth, plans, fronts, DRAM, mechanisms, and what differs. The figures are
those of each build's metrics.json, drawn by the code that draws the report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldpress.compiler.block_statistics import with_error
from coldpress.compiler.headline import headline, rate
from coldpress.compiler.stages.report.charts import Chart, dram_bars
from coldpress.compiler.stages.report.comparison import FRONT_COLUMNS, front_chart, front_rows, reads_chart, time_chart
from coldpress.compiler.stages.report.page import environment
from coldpress.compiler.stages.report.page_charts import ladder_chart
from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import Metrics

LETTERS = ("A", "B")
PLAN_COLUMNS = ("DRAM budget", "selector", "cache", "context", "KV cache", "collapse gap", "preload")


@dataclass(frozen=True)
class ComparedArtifact:
    path: Path
    metrics: Metrics
    manifest: Manifest


def render(one: ComparedArtifact, other: ComparedArtifact, rows: Sequence[tuple[str, ...]]) -> str:
    """Returns the page; `rows` are what differs: (name, value in A, value in B, how many times as large)."""
    both = dict(zip(LETTERS, (one, other), strict=True))
    metrics = {letter: build.metrics for letter, build in both.items()}
    return (
        environment(Path(__file__).parent)
        .get_template("diff_page.html.j2")
        .render(
            builds=[_shown(letter, build) for letter, build in both.items()],
            figures=list(_figures(one.metrics, other.metrics)),
            charts=[front_chart(metrics), time_chart(metrics)],
            plans=[_plan_row(letter, plan) for letter, build in both.items() for plan in build.manifest.plans],
            plan_columns=PLAN_COLUMNS,
            front_columns=FRONT_COLUMNS,
            mechanisms=list(_mechanisms(metrics)),
            rows=rows,
        )
    )


def _shown(letter: str, build: ComparedArtifact) -> dict[str, Any]:
    metrics = build.metrics
    return {
        "letter": letter,
        "title": f"{metrics.model} on {metrics.device}",
        "place": f"{build.path}, {metrics.artifact_sha256[:12]}, made by coldpress {metrics.provenance.compiler}",
        "headline": headline(metrics, build.manifest.device.title),
        "budget_bytes": metrics.budget_bytes,
        "dram": dram_bars(metrics),
        "front": front_rows(metrics),
    }


def _figures(one: Metrics, other: Metrics) -> Iterator[tuple[str, ...]]:
    """Yields (name, A, B, B over A) of the key figures."""
    for (name, a, shown_a), (_, b, shown_b) in zip(_amounts(one), _amounts(other), strict=True):
        yield (name, shown_a, shown_b, f"× {b / a:.3f}" if a and b and a != b else "")


def _amounts(metrics: Metrics) -> Iterator[tuple[str, float, str]]:
    """Yields (name, figure, figure as shown); a figure of 0 stands for one that a build does not have."""
    dense, original = metrics.dense, metrics.original
    speed, ratio = metrics.modelled_tokens_per_s, metrics.ppl_ratio
    yield "tokens/s, simulated", speed, rate(speed)
    of_dense = dense.tokens_per_s if dense else 0.0
    yield "a dense run, same DRAM", of_dense, rate(of_dense) if dense else "does not fit"
    yield "the original, all in DRAM", original.tokens_per_s, rate(original.tokens_per_s)
    yield "perplexity over the source's", ratio, with_error(ratio, metrics.ppl_ratio_error, 4)
    for name, size in (
        ("DRAM budget", metrics.budget_bytes),
        ("the process beside it", metrics.process_bytes),
        ("DRAM of the original", original.dram_bytes),
        ("artifact", metrics.artifact_bytes),
        ("read from flash per token", metrics.flash_bytes_per_token),
    ):
        yield name, size, show_bytes(size)
    yield "reads per token", metrics.reads_per_token, f"{metrics.reads_per_token:.1f}"
    yield "cache hit rate", metrics.hit_rate, f"{100 * metrics.hit_rate:.1f} %"


def _plan_row(letter: str, plan: Plan) -> tuple[str, ...]:
    return (
        f"{letter}, {plan.name}",
        show_bytes(plan.dram_budget_bytes),
        plan.method,
        plan.cache,
        f"{plan.context_length} tokens",
        plan.kv_cache,
        show_bytes(plan.collapse_gap_bytes) + (", adaptive" if plan.collapse == "adaptive" else ""),
        show_bytes(plan.preload_buffer_bytes) if plan.preload_buffer_bytes else "no",
    )


def _mechanisms(metrics: dict[str, Metrics]) -> Iterator[Chart]:
    for letter, found in metrics.items():
        if found.ladder:
            yield ladder_chart(found.ladder, f"{letter}: ")
    for letter, found in metrics.items():
        if (chart := reads_chart(found, f"{letter}: ")) is not None:
            yield chart
