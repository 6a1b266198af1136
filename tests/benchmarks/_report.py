"""How every benchmark ends: a table for people, then one line of JSON for programs."""

import json
from collections.abc import Iterable, Mapping, Sequence

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
    """Prints the last line."""
    print(json.dumps(figures, sort_keys=True))
