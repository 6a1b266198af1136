"""Provides what all benchmarks share: sizes, kept rows, progress, records, and the inputs that make a record stale."""

from benchmarks.harness.benchmark import Benchmark, Cell, Figures, Row, Rows, option
from benchmarks.harness.command import main
from benchmarks.harness.tables import Table
from benchmarks.harness.timing import Gain, Spread, gain, interleaved, spread

__all__ = [
    "Benchmark",
    "Cell",
    "Figures",
    "Gain",
    "Row",
    "Rows",
    "Spread",
    "Table",
    "gain",
    "interleaved",
    "main",
    "option",
    "spread",
]
