"""Writes rows of a record as a table in Markdown.

A page asks for it by a hidden comment, and the table follows:

    <!-- table of paper_tables, paper=Ripple: table, cell, published .4g, ours .4g, unit -->

Before the colon stand the benchmark and the values that a row must have, after it the columns, each with a format of
Python where it is a number. A figure with a spread is its median.
"""

import re
from collections.abc import Mapping
from typing import Any

COMMENT = re.compile(
    r"<!-- table of (?P<name>\w+)(?P<where>(?:, \w+=[^,:]+)*): (?P<columns>[^>]+?) -->\n+(?P<shown>(?:\|.*\n)*)"
)


def table(record: Mapping[str, Any], where: str, columns: str) -> str:
    """Returns the table, one line a row.

    Args:
        record: With `figures.rows`.
        where: As `, paper=Ripple`; empty for all rows.
        columns: As `cell, ours .4g`.

    Raises:
        KeyError: if no row has such values, or no row has a column.
    """
    rows = [row for row in record["figures"]["rows"] if fits(row, where)]
    asked = [(name, form) for name, _, form in (column.strip().partition(" ") for column in columns.split(", "))]
    if not rows or any(all(name not in row for row in rows) for name, _ in asked):
        raise KeyError(where)
    head = [name.replace("_", " ") for name, _ in asked]
    lines = [head, ["---"] * len(asked), *([_text(row.get(name), form) for name, form in asked] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fits(row: Mapping[str, Any], where: str) -> bool:
    """Returns whether a row has the values that `where` asks for."""
    wanted = (part.split("=") for part in where.split(", ")[1:])
    return all(_text(row.get(name), "") == value for name, value in wanted)


def _text(value: Any, form: str) -> str:
    """Returns a value as it is shown."""
    if isinstance(value, Mapping):
        value = value["median"]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return ""
    return format(value, form) if isinstance(value, int | float) else str(value)
