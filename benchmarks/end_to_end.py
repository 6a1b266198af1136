"""The whole pipeline on every small real model: artifact size, DRAM, flash traffic, quality, speed.

Each model is built from scratch with the defaults that suit it, under a DRAM budget that is a share of its dense
footprint. The figures are those of the build's own report; its speed is of this machine, which reads from its disk with
O_DIRECT. The jobs of a build are forked from a process that has imported the libraries.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness.benchmark import Benchmark, Cell, Row, option
from benchmarks.harness.command import main
from benchmarks.shared.builds import MODELS, build, settings


@dataclass(frozen=True)
class Options:
    """What is built."""

    models: tuple[str, ...] = option(
        ("demo", "stories260k", "tinystories656k", "tinystories656k-relu", "prose7m"),
        smoke=("stories260k",),
        full=tuple(MODELS),
        choices=MODELS,
        help="models",
    )
    device: str = option("pixel6", help="device profile")
    short: bool = option(False, smoke=True, help="calibrate and score on less text")


class Plugin(Benchmark[Options]):
    """Builds each model."""

    keys = {
        "rows[].model": "model",
        "rows[].artifact_bytes": "bytes of the artifact",
        "rows[].resident_bytes": "bytes that are always in DRAM",
        "rows[].budget_bytes": "DRAM budget",
        "rows[].flash_bytes_per_token": "bytes read for a token",
        "rows[].reads_per_token": "reads for a token",
        "rows[].hit_rate": "share of used units that were in DRAM",
        "rows[].ppl_source": "perplexity of the checkpoint on test text",
        "rows[].ppl_artifact": "perplexity of the artifact on the same text",
        "rows[].tokens_per_s": "tokens per second on this machine, over all blocks of the text",
        "rows[].tokens_per_s_deviation?": "their standard deviation from block to block",
    }
    is_timing = True
    needs_data = True
    full_minutes = 6

    def cells(self) -> Iterator[Cell]:
        """One per model."""
        return ({"model": model} for model in self.options.models)

    def measure(self, cell: Cell) -> Iterator[Row]:
        """One row."""
        model = cell["model"]
        top = build(self.folder / model, **settings(model, self.options.device, self.options.short))
        metrics = json.loads((top / "metrics.json").read_text())
        yield {name: metrics[name] for name in map(_name, self.keys) if name in metrics and name != "model"}


def _name(key: str) -> str:
    return key.rpartition(".")[2].rstrip("?")


if __name__ == "__main__":
    main("end_to_end")
