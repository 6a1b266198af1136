"""Runs the whole pipeline on every small real model: size, DRAM, flash traffic, quality and speed beside a dense run.

Each model is built from scratch with the defaults, under a DRAM budget that is a share of its dense footprint; the demo
has the budget of its profile. The figures are those of the build's own report. The build also calculates the dense run
(compiler/dense_run.py): same weights, format and DRAM, its own buffers. Speed is simulated on the device, and measured
on this machine, which reads from its disk with O_DIRECT. The jobs of a build are forked from a process that has
imported the libraries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.builds import MODELS, build, settings
from coldpress.compiler.io import load_record
from coldpress.runtime import plugins
from coldpress.schemas.metrics import Metrics

OF_THE_BUILD = {
    "method": "selector of the artifact",
    "artifact_bytes": "bytes of the artifact's files",
    "resident_bytes": "bytes of the weights that are always in DRAM",
    "budget_bytes": "DRAM budget in bytes",
    "flash_bytes_per_token": "bytes read from flash per token",
    "reads_per_token": "reads from flash per token",
    "hit_rate": "share of requested units that were in DRAM",
    "ppl_source": "perplexity of the checkpoint on test text",
    "ppl_artifact": "perplexity of the artifact on the same text",
    "ppl_dense": "perplexity of the artifact with every unit used",
    "tokens_per_s": "tokens per second on this machine, over all measured blocks of test text",
    "tokens_per_s_deviation": "standard deviation of tokens_per_s from block to block",
    "modelled_tokens_per_s": "tokens per second that the simulator finds for the device",
    "gain_over_dense": "simulated tokens per second over the dense run's; null where the budget holds no dense run",
}
OF_THE_DENSE_RUN = {
    "flash_bytes_per_token": "bytes read from flash per token of the dense run",
    "reads_per_token": "reads from flash per token of the dense run",
    "tokens_per_s": "simulated tokens per second of the dense run",
}
MAY_BE_NULL = ("tokens_per_s_deviation", "ppl_dense", "gain_over_dense")


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("relu-demo", "stories260k", "tinystories656k-relu", "prose7m"),
        smoke=("tinystories656k-relu",),
        full=tuple(MODELS),
        choices=MODELS,
        help="models to build",
    )
    method: str = option(
        "auto",
        smoke="relu",  # a search over all takes 25 s; the smokes of prediction and plan_search have one
        choices=("auto", *plugins.names("coldpress.runtime.sparsity")),
        help="selector of the artifacts; auto lets the build choose",
    )
    short: bool = option(True, full=False, help="calibrate and score on less text")


class Plugin(Benchmark[Options]):
    keys = {
        **{f"rows[].{name}{'?' * (name in MAY_BE_NULL)}": meaning for name, meaning in OF_THE_BUILD.items()},
        **{f"rows[].dense_{name}?": meaning for name, meaning in OF_THE_DENSE_RUN.items()},
        "worst_gain?": "least gain_over_dense of all models",
        "demo_gain?": "gain_over_dense of the demo; null where it was left out",
    }
    is_timing = True
    needs_data = True
    over = {"model": "models"}
    full_minutes = 8

    def measure(self, cell: Cell) -> Iterator[Row]:
        model, options = cell["model"], self.options
        config: dict[str, Any] = settings(model, short=options.short) | {"method": options.method}
        if model == "relu-demo":
            del config["dram_budget"]
        found = load_record(build(self.folder / model, **config) / "metrics.json", Metrics)
        dense = {f"dense_{name}": found.dense and getattr(found.dense, name) for name in OF_THE_DENSE_RUN}
        yield {name: getattr(found, name) for name in OF_THE_BUILD} | dense

    def figures(self, rows: Rows) -> Figures:
        gains = {row["model"]: row["gain_over_dense"] for row in rows if row["gain_over_dense"] is not None}
        return {"worst_gain": min(gains.values(), default=None), "demo_gain": gains.get("relu-demo")}


if __name__ == "__main__":
    main("end_to_end")
