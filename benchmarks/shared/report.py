"""How every benchmark ends: a table for people, then one line of JSON for programs."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table; floats get four significant digits."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if column != columns[0] else "left")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    Console(width=160).print(table)


def finish(figures: Mapping[str, object]) -> None:
    """Prints the last line. A figure that is NaN or infinite, which JSON has no word for, is null there: what else a
    long run has found is worth keeping, and the table above tells which it was."""
    print(json.dumps(_finite(figures), sort_keys=True, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
