"""Checks the figures of documents against the records that they come from.

    python -m benchmarks.harness.documents [--fix]

A figure in Markdown is followed by a hidden comment with the benchmark, the path of the figure in its record, and the
format, as `1.49<!-- ladder: layout_median, .2f -->`. harness/compare.py names figures by the same paths; a figure with
a spread is its median. A whole block of text follows its comment, as `<!-- demo: screen -->`, and so does a table of a
record's rows (harness/row_tables.py). Ends with code 1 and a line for each figure that differs; `--fix` writes the
records' figures.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from benchmarks.harness import row_tables
from benchmarks.harness.compare import named
from benchmarks.harness.places import ROOT, names, record_of

DOCUMENTS = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
MARK = re.compile(r"(?P<shown>[\w.,+-]*)<!-- (?P<name>\w+(?:\.full)?): (?P<path>[^>]+?), (?P<format>[^,>]*) -->")

BLOCK = re.compile(
    r"<!-- (?P<name>\w+(?:\.full)?): (?P<path>\w+) -->\n+```(?:text)?\n(?:\.\.\.\n)?(?P<shown>.*?)(?=\n```\n)",
    re.DOTALL,
)


def figure(record: Mapping[str, Any], path: str, form: str) -> str:
    """Returns the figure of a record as text.

    Raises:
        KeyError: if the record has none of this path.
    """
    found = dict(named(record["figures"]))[path]
    return format(found["median"] if isinstance(found, Mapping) else found, form)


def checked(text: str, records: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Returns (the text with the records' figures, a line for each figure that differs or has no record)."""
    said: list[str] = []

    def replaced(found: re.Match[str]) -> str:
        asked = found.groupdict()
        place = asked.get("path") or f"{asked['where']}: {asked['columns']}"
        try:
            record = records[found["name"]]
            if "columns" in asked:
                true = row_tables.table(record, asked["where"], asked["columns"])
            else:
                true = figure(record, asked["path"], asked.get("format", ""))
        except KeyError:
            said.append(f"{found['name']}: {place} is in no record; shown is {found['shown']!r}")
            return found[0]
        for line, shown in zip_longest(true.split("\n"), found["shown"].split("\n")):
            if line != shown:
                said.append(f"{found['name']}: {place} is {line}, shown is {shown}")
        return text[found.start() : found.start("shown")] + true + text[found.end("shown") : found.end()]

    for mark in (BLOCK, MARK, row_tables.COMMENT):
        text = mark.sub(replaced, text)
    return text, said


def read_records() -> dict[str, Any]:
    """Returns all committed records: `name` and `name.full` -> record."""
    paths = {f"{name}{suffix}": record_of(name, size) for name in names() for size, suffix in _SUFFIXES}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


_SUFFIXES = (("default", ""), ("full", ".full"))


def main() -> int:
    """Checks all documents, or writes their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="write the records' figures")
    fix = parser.parse_args().fix
    records, wrong = read_records(), 0
    for name in DOCUMENTS:
        path = ROOT / name
        text, said = checked(path.read_text(encoding="utf-8"), records)
        if fix:
            path.write_text(text, encoding="utf-8")
            said = [sentence for sentence in said if "in no record" in sentence]
        print(*(f"{name}: {sentence}" for sentence in said), sep="\n", end="\n" if said else "")
        wrong += len(said)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
