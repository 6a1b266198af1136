"""Keeps each measured row as soon as it is there, so that a second start goes on where the first was stopped."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Cell, Row
from benchmarks.harness.places import WORK


@dataclass
class Kept:
    """The rows of one benchmark with one set of options and one state of the code."""

    path: Path
    cells: dict[str, list[Row]] = field(default_factory=dict)
    """Cell as JSON -> its rows."""
    seconds: float = 0.0
    """Seconds that measuring the rows took."""
    inputs: set[str] = field(default_factory=set)
    """Names of the inputs that were loaded for the rows."""

    def add(self, cell: Cell, rows: list[Row], seconds: float) -> None:
        """Keeps the rows of a cell."""
        self._write({"cell": key_of(cell), "rows": rows, "seconds": seconds})
        self.cells[key_of(cell)] = rows
        self.seconds += seconds

    def add_inputs(self, names: list[str]) -> None:
        """Keeps the names of the inputs that this start has loaded."""
        self.inputs |= set(names)
        self._write({"inputs": names})

    def _write(self, line: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def drop(self) -> None:
        """Removes the file of the rows."""
        self.path.unlink(missing_ok=True)


def key_of(cell: Cell) -> str:
    """Returns a cell as text."""
    return json.dumps(dict(cell), sort_keys=True)


def kept_rows(name: str, options: Mapping[str, Any], code: str) -> Kept:
    """Returns the rows of earlier starts; a line that was cut off does not count."""
    told = json.dumps([name, options, code], sort_keys=True, default=str)
    kept = Kept(WORK / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.jsonl")
    for line in kept.path.read_text(encoding="utf-8").splitlines() if kept.path.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if "inputs" in found:
            kept.inputs |= set(found["inputs"])
        else:
            kept.cells[found["cell"]] = found["rows"]
            kept.seconds += found["seconds"]
    return kept
