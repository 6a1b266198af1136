"""Compares the choice of `method=auto`, which measures what can still win, with that of explore=whole, on real models.

Both builds go as far as `allocate`, by the product's own rules, on the same text, for each DRAM budget. Seconds are the
processor's of `explore` and `allocate`, the first budget's with what later budgets find again. Speeds are the law's.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.harness.places import data
from benchmarks.shared.real_models import MODELS, SHORT, SMALL, file_of, named, stages
from coldpress.compiler.io import load_record
from coldpress.schemas.sparsity import Sparsity
from tests.support.pipeline import build, target

WAYS = ("needed", "whole")


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        MODELS[:1], smoke=(SMALL,), full=MODELS, choices=(*MODELS, SMALL), help="models to build"
    )
    shares: tuple[float, ...] = option((0.4, 0.6, 0.8), smoke=(0.8,), help="DRAM budgets as shares of the file's bytes")
    device: str = option("pixel6", help="device profile")
    explore_tokens: int = option(2048, smoke=256, help="tokens on which candidates are measured, of both ways")
    short: bool = option(False, smoke=True, help="calibrate on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].way": "value of explore=",
        "rows[].refused?": "why there is no choice",
        "rows[].method?": "selector that was chosen",
        "rows[].format?": "its format",
        "rows[].density?": "its density",
        "rows[].token_s?": "modelled seconds per token",
        "rows[].explore_s": "processor seconds of explore; 0 where an earlier budget ran it",
        "rows[].allocate_s": "processor seconds of allocate; 0 where it refused",
        "speed.*.*?": "speed of the default choice over that of explore=whole, by model and share; 0: it refused",
        "worst_speed?": "least of speed",
        "seconds.*.*": "processor seconds of explore and allocate for all budgets, by way and model",
    }
    is_timing = True
    needs_data = True
    over = {"model": "models", "way": WAYS, "share": "shares"}
    full_minutes = 400

    def measure(self, cell: Cell) -> Iterator[Row]:
        model, way = cell["model"], cell["way"]
        file = self.once(model, lambda: file_of(model, self.folder))
        config: dict[str, Any] = {"model": file, "device": self.options.device, "explore": way}
        config |= {"explore_tokens": self.options.explore_tokens, "context_length": 512, "preflight": "off"}
        config |= SHORT if self.options.short else {}
        config |= {
            "method": "auto",
            "corpus": data() / "corpora" / "wikitext-2",
            "dram_budget": int(cell["share"] * file.stat().st_size),
        }
        folder, started = self.folder / f"{model}-{way}", time.time()
        try:
            build(folder, "allocate", **config)
            best = load_record(target(folder, **config) / "allocate.json", Sparsity).tried[0]
            row: Row = {name: getattr(best, name) for name in ("method", "format", "density", "token_s")}
            row["format"] = str(row["format"])
        except RuntimeError as error:
            row = {"refused": str(error).strip().splitlines()[-1]}
        took = {name: stage["cpu_s"] for name, stage in stages(target(folder, **config), started).items()}
        yield row | {"explore_s": took.get("explore", 0.0), "allocate_s": took.get("allocate", 0.0)}

    def figures(self, rows: Rows) -> Figures:
        token_s = {
            (row["model"], row["way"], f"{row['share']:.0%}"): row["token_s"] for row in rows if "refused" not in row
        }
        speed: dict[str, dict[str, float]] = {}
        for (model, way, share), seconds in token_s.items():
            if way == "whole":
                default_s = token_s.get((model, "needed", share), math.inf)
                speed.setdefault(named(model), {})[share] = seconds / default_s
        return {
            "speed": speed,
            "worst_speed": min((one for found in speed.values() for one in found.values()), default=None),
            "seconds": {way: _seconds([row for row in rows if row["way"] == way]) for way in WAYS},
        }


def _seconds(rows: Rows) -> dict[str, float]:
    """Returns the processor seconds of explore and allocate, by model."""
    found: dict[str, float] = {}
    for row in rows:
        model = named(row["model"])
        found[model] = found.get(model, 0.0) + row["explore_s"] + row["allocate_s"]
    return found


if __name__ == "__main__":
    main("choice")
