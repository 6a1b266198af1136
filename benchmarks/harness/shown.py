"""Takes from a record the part that is committed: all figures, but of long lists only those rows that documents show.

Figures of a record are named as in harness/compare.py. Whole records lie in build/benchmarks/records; a figure of a row
that no document has shown yet is taken from there by `python -m benchmarks.harness.documents --fix`, or measured again.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks.harness import row_tables
from benchmarks.harness.tables import label_of

MARK = re.compile(r"(?P<shown>[\w.,+-]*)<!-- (?P<name>\w+(?:\.full)?): (?P<path>[^>]+?), (?P<format>[^,>]*) -->")
"""A figure and its comment: benchmark, path, and format."""
BLOCK = re.compile(
    r"<!-- (?P<name>\w+(?:\.full)?): (?P<path>\w+) -->\n+```(?:text)?\n(?:\.\.\.\n)?(?P<shown>.*?)(?=\n```\n)",
    re.DOTALL,
)
"""A comment and the block of text that follows it."""
MOST_LINES = 350
"""Lines of a record up to which a list is committed whole."""


class Shown(NamedTuple):
    """The figures that documents take from a record."""

    paths: frozenset[str]
    tables: frozenset[str]
    """Conditions on the rows of each table, as in harness/row_tables.py."""

    def has_row(self, name: str, row: Mapping[str, Any]) -> bool:
        """Returns whether a document shows a row of the list `name`."""
        own = re.compile(re.escape(f"{name}[{label_of(row)}") + r"(#\d+)?\]")
        return any(map(own.match, self.paths)) or (
            name == "rows" and any(row_tables.fits(row, where) for where in self.tables)
        )


def shown(texts: Iterable[str]) -> dict[str, Shown]:
    """Returns what documents show of each record."""
    paths, tables = dict[str, set[str]](), dict[str, set[str]]()
    for text in texts:
        for mark in (*MARK.finditer(text), *BLOCK.finditer(text)):
            paths.setdefault(mark["name"], set()).add(mark["path"])
        for comment in row_tables.COMMENT.finditer(text):
            tables.setdefault(comment["name"], set()).add(comment["where"])
    names = {*paths, *tables}
    return {name: Shown(frozenset(paths.get(name, ())), frozenset(tables.get(name, ()))) for name in names}


def committed(record: Mapping[str, Any], of: Shown | None) -> dict[str, Any]:
    """Returns a record whose long lists have only the rows that documents show; `left_out` counts the others."""
    of = of or Shown(frozenset(), frozenset())
    figures, left_out = dict(record["figures"]), dict(record.get("left_out", {}))
    for name, items in figures.items():
        is_list = isinstance(items, list) and all(isinstance(item, Mapping) for item in items)
        if is_list and json.dumps(items, indent=1).count("\n") > MOST_LINES:
            labels = {
                label_of(item) for item in items if of.has_row(name, item)
            }  # equal labels are told apart by number
            figures[name] = [item for item in items if label_of(item) in labels]
            if len(figures[name]) < len(items):
                left_out[name] = left_out.get(name, 0) + len(items) - len(figures[name])
    return {**record, "figures": figures, "left_out": left_out}
