"""Makes reports of tiny builds."""

from pathlib import Path
from typing import Any

from coldpress.compiler.stages.report import ReportConfig, run
from coldpress.schemas.metrics import Metrics
from coldpress.schemas.sparsity import Tried
from tests.support.records import Build, tiny_activations, tiny_verification


def report(build: Build, folder: Path, llama_bench: str | None = None, **changes: Any) -> tuple[Metrics, str]:
    """Packages a build and writes report.html into `folder`; `changes` replace records.

    Returns:
        The figures, and the page.
    """
    package = build.package()
    records = {
        "model": build.model,
        "corpus": build.corpus,
        "device": build.device,
        "activations": tiny_activations(folder, build.model, build.sparsity),
        "sparsity": build.sparsity,
        "placement": build.placement,
        "order": build.order,
        "predictors": build.predictors if build.method == "predictor" else None,
        "layout": build.layout,
        "plans": build.plans,
        "package": package,
        "verification": tiny_verification(build.plans, package.manifest_sha256),
    }
    metrics = run(ReportConfig(html=str(folder / "report.html"), llama_bench=llama_bench), **(records | changes))
    return metrics, (folder / "report.html").read_text(encoding="utf-8")


def candidate(method: Any, tokens_per_s: float, ppl_ratio: float, **more: Any) -> Tried:
    """Returns a candidate of a search."""
    return Tried(
        method=method,
        format="int4_group32",
        cache="lfu",
        kv_cache="fp16",
        token_s=1 / tokens_per_s,
        density=0.5,
        ppl_ratio=ppl_ratio,
        dram_bytes=1_000_000,
        **more,
    )
