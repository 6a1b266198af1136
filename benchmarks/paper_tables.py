"""Prints the papers' tables beside ours: the published figure, our figure, their ratio, and the basis of ours.

Our figures come from device profiles, shapes of models and statistics that the papers state, by the papers' own
equations (shared/papers) on this project's law of reads and of computing. No figure is fitted to the cell that it is
compared with: a rate of computing comes from another row, which the basis names. A cell that is off says why. Figures
that need traces, training or a solver have benchmarks of their own: Ripple in ladder, collapse, cache_policies and
order; LLM in a flash in predictors and relufication; PowerInfer in place, batch and predictors; ActiveFlow in preload,
cache_policies and distillation; DIP in sparsity, allocation and dip_ca.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.published import activeflow, dip, llm_in_a_flash, ripple

PAPERS: Mapping[str, ModuleType] = {
    "Ripple": ripple,
    "LLM in a flash": llm_in_a_flash,
    "ActiveFlow": activeflow,
    "DIP": dip,
}


@dataclass(frozen=True)
class Options:
    papers: tuple[str, ...] = option(tuple(PAPERS), choices=PAPERS, help="papers whose tables are printed")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].table": "table, figure or section of the paper",
        "rows[].cell": "row and column in the table",
        "rows[].unit": "unit of both figures",
        "rows[].published": "the paper's figure",
        "rows[].ours": "our figure",
        "rows[].ratio": "our figure over the paper's",
        "rows[].within": "whether the ratio differs from 1 by at most the tolerance",
        "rows[].tolerance": "share of the paper's figure by which ours may differ",
        "rows[].basis": "what our figure is computed from",
        "rows[].note": "why our figure differs by more; empty if it does not",
        "by_paper.*.cells": "number of cells of the paper",
        "by_paper.*.within": "cells whose ratio is within the tolerance",
    }
    over = {"paper": "papers"}
    full_minutes = 0.1

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per cell of its tables."""
        for one in PAPERS[cell["paper"]].cells():
            found = {"ratio": one.ratio, "within": one.within, "note": "" if one.within else one.note}
            yield asdict(one) | found

    def figures(self, rows: Rows) -> Figures:
        by_paper: dict[str, dict[str, int]] = {}
        for row in rows:
            counts = by_paper.setdefault(row["paper"], {"cells": 0, "within": 0})
            counts["cells"] += 1
            counts["within"] += row["within"]
        return {"by_paper": by_paper}


if __name__ == "__main__":
    main("paper_tables")
