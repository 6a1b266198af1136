"""What `auto` gives beside a dense run in the same DRAM: flash traffic, simulated speed and perplexity.

Each model is built from scratch; the dense run is the one that the build itself works out (compiler/dense_run.py): same
weights, format and DRAM, its own buffers. The demo has the budget of its profile. The jobs of a build are forked from a
process that has imported the libraries.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Cell, Row, option
from benchmarks.harness.command import main
from benchmarks.shared.builds import build, settings
from coldpress.compiler.io import load_record
from coldpress.runtime import plugins
from coldpress.schemas.metrics import Metrics

MODELS = ("demo", "prose7m", "prose7m-relu", "stories260k", "tinystories656k", "tinystories656k-relu")


@dataclass(frozen=True)
class Options:
    """What is built."""

    models: tuple[str, ...] = option(
        MODELS[:2] + MODELS[3:], smoke=("stories260k",), full=MODELS, choices=MODELS, help="models"
    )
    method: str = option(
        "auto", choices=("auto", *plugins.names("coldpress.runtime.sparsity")), help="selector that is set beside dense"
    )
    device: str = option("pixel6", help="device profile")
    short: bool = option(False, smoke=True, help="calibrate and score on less text")


class Plugin(Benchmark[Options]):
    """Builds each model."""

    keys = {
        "rows[].model": "model",
        "rows[].method": "the selector that was taken",
        "rows[].flash_bytes": "bytes read for a token",
        "rows[].dense_flash_bytes?": "the same of the dense run",
        "rows[].reads": "reads for a token",
        "rows[].dense_reads?": "the same of the dense run",
        "rows[].tokens_per_s": "simulated tokens per second on the device",
        "rows[].dense_tokens_per_s?": "the same of the dense run",
        "rows[].ppl": "perplexity of the artifact",
        "rows[].dense_ppl?": "perplexity with all of its weights",
        "rows[].ppl_source": "perplexity of the checkpoint",
        "rows[].gain?": "simulated tokens per second over the dense run's; null where no dense run fits",
        "worst_gain?": "the least of these gains",
        "demo_gain?": "that of the demo; null where it was left out",
    }
    needs_data = True
    full_minutes = 5

    def cells(self) -> Iterator[Cell]:
        """One per model."""
        return ({"model": model} for model in self.options.models)

    def measure(self, cell: Cell) -> Iterator[Row]:
        """One row."""
        model, options = cell["model"], self.options
        config: dict[str, Any] = settings(model, options.device, options.short) | {"method": options.method}
        if model == "demo":
            del config["dram_budget"]
        yield row_of(load_record(build(self.folder / model, **config) / "metrics.json", Metrics))

    def figures(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """The gains over all models."""
        gains = {row["model"]: row["gain"] for row in rows if row["gain"] is not None}
        return {"worst_gain": min(gains.values(), default=None), "demo_gain": gains.get("demo")}


def row_of(found: Metrics) -> Row:
    """Figures of a build and of its dense run, per token."""
    dense = found.dense
    return {
        "method": found.method,
        "flash_bytes": found.flash_bytes_per_token,
        "dense_flash_bytes": dense and dense.flash_bytes_per_token,
        "reads": found.reads_per_token,
        "dense_reads": dense and dense.reads_per_token,
        "tokens_per_s": found.modelled_tokens_per_s,
        "dense_tokens_per_s": dense and dense.tokens_per_s,
        "ppl": found.ppl_artifact,
        "dense_ppl": found.ppl_dense,
        "ppl_source": found.ppl_source,
        "gain": found.gain_over_dense,
    }


if __name__ == "__main__":
    main("auto")
