"""Makes tables for people from the rows and figures of a benchmark."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.keys import SPREAD


@dataclass(frozen=True)
class Table:
    """A table for people."""

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[object]]


def tables_of(name: str, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the rows, a table for each `part` of them, each list of objects in rows and figures, and other figures."""
    for part in dict.fromkeys(row.get("part") for row in rows):
        yield table_of(part or name, [row for row in rows if row.get("part") == part])
    for row in rows:
        texts = [value for value in row.values() if isinstance(value, str)]
        yield from _lists(row, ", ".join(("", *texts)))
    others = {name: value for name, value in figures.items() if name != "rows"}
    yield from _lists(others, "")
    if plain := [(name, value) for name, value in _flat(others) if is_one(value)]:
        yield Table("figures", ("figure", "value"), plain)


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table with a column for each name that is one figure in some row."""
    flat = [dict(_flat(row)) for row in rows]
    columns = [
        name for name in dict.fromkeys(key for row in flat for key in row) if any(is_one(row.get(name)) for row in flat)
    ]
    return Table(title, columns, [[row.get(name) for name in columns] for row in flat])


def is_one(value: Any) -> bool:
    """Returns whether a value is one figure, with or without its spread."""
    return (
        value is not None and not isinstance(value, list) and (not isinstance(value, Mapping) or set(value) >= SPREAD)
    )


def label_of(item: Mapping[str, Any]) -> str:
    """Returns the texts of an object in a list, by which its figures are named."""
    return ",".join(f"{name}={text}" for name, text in item.items() if isinstance(text, str))


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and not is_one(value):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, value


def _lists(found: Mapping[str, Any], of: str) -> Iterator[Table]:
    """Yields a table for each value that holds several objects, in a list or by name."""
    for name, value in found.items():
        if isinstance(value, Mapping) and not is_one(value):
            value = [
                {name: key, **item} for key, item in value.items() if isinstance(item, Mapping) and not is_one(item)
            ]
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield table_of(name + of, value)
