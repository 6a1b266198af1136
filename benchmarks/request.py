"""Measures what Python costs: calls, functions and files of a request, processor time of a request and a token.

A tiny top-k artifact decodes with all units in DRAM ("hits") and with an eighth of them ("reads"). Calls are traced: a
request covers all work of a layer's MLP for one of its two families, from input to output. Files and functions are the
product's; calls are also counted with those of libraries. `--before` measures another checkout with the interpreter of
its .venv, in turn with this one, and their ratio; that checkout may be older than this benchmark
(benchmarks/shared/request_cost.py).
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option, spread
from benchmarks.harness.places import BENCHMARKS, ROOT
from coldpress.schemas.errors import ColdpressError

MEASURE = BENCHMARKS / "shared" / "request_cost.py"
RUN = f"import runpy, sys; sys.path.insert(0, '.'); runpy.run_path({str(MEASURE)!r}, run_name='__main__')"
FIGURES = {
    "requests": "requests of a token",
    "calls": "calls of the product's functions in a request",
    "functions": "functions of the product in a request",
    "files": "files of the product in a request",
    "calls_with_libraries": "calls in a request, those of libraries included",
    "token_us": "microseconds of processor time of a token, the least of the rounds",
    "request_us?": "microseconds of a request that hits everything, the least of the rounds",
}
US = "_us"


@dataclass(frozen=True)
class Options:
    before: str = option("", help="another checkout, to compare with")
    rounds: int = option(10, smoke=1, help="rounds of a turn; the fastest counts")
    turns: int = option(5, smoke=1, full=9, help="turns of each checkout")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].checkout": "after: this one; before: the other one",
        "rows[].case": "hits: all units in DRAM; reads: an eighth",
        **{f"rows[].{name}": meaning for name, meaning in FIGURES.items()},
        **{f"after.*.{name}": f"{meaning}; by case, over the turns" for name, meaning in FIGURES.items()},
        **{f"before.*.{name.rstrip('?')}?": f"{meaning}; the other checkout" for name, meaning in FIGURES.items()},
        "after_over_before.*.*?": "ratio of each figure, by case, formed in each turn",
    }
    is_timing = True
    over = {"turn": "turns"}
    full_minutes = 2

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per checkout and case."""
        before = {"before": Path(self.options.before).resolve()} if self.options.before else {}
        for name, checkout in (before | {"after": ROOT}).items():
            for case, figures in self.cost(checkout).items():
                yield {"checkout": name, "case": case, **figures}

    def cost(self, checkout: Path) -> dict[str, dict[str, float]]:
        """Returns the figures of a checkout by case, measured in a process of its interpreter."""
        python = Path(sys.executable) if checkout == ROOT else checkout / ".venv/bin/python"
        if not python.exists():
            raise ColdpressError(f"{checkout} has no .venv/bin/python; install that checkout, or name another --before")
        command = [python, "-c", RUN, str(self.options.rounds)]
        done = subprocess.run(command, cwd=checkout, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ColdpressError(f"{checkout} cannot be measured: {(done.stderr.splitlines() or ['no answer'])[-1]}")
        found = json.loads(done.stdout.splitlines()[-1])
        if not all(figures["functions"] for figures in found.values()):
            raise ColdpressError(f"{checkout}: its .venv runs the code of another folder; install the checkout into it")
        return found

    def figures(self, rows: Rows) -> Figures:
        found: dict[str, dict[str, Any]] = {"after_over_before": {}}
        for checkout, case in dict.fromkeys((row["checkout"], row["case"]) for row in rows):
            turns = turns_of(rows, checkout, case)
            found.setdefault(checkout, {})[case] = {
                name: spread(samples) if name.endswith(US) else median(samples) for name, samples in turns.items()
            }
            if checkout == "after" and self.options.before:
                before = turns_of(rows, "before", case)
                found["after_over_before"][case] = {
                    name: spread([after / then for after, then in zip(samples, before[name], strict=True)])
                    for name, samples in turns.items()
                }
        return found


def turns_of(rows: Rows, checkout: str, case: str) -> dict[str, list[float]]:
    """Returns each figure in every turn."""
    turns = [row for row in rows if row["checkout"] == checkout and row["case"] == case]
    names = [name.rstrip("?") for name in FIGURES]
    return {name: [turn[name] for turn in turns] for name in names if name in turns[0]}


if __name__ == "__main__":
    main("request")
