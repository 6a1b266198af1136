"""Checks the figures of documents against the records that they come from.

    python -m benchmarks.harness.documents [--fix]

A figure in Markdown is followed by a hidden comment with the benchmark, the path of the figure in its record, and the
format, as `1.49<!-- ladder: layout_median, .2f -->`. harness/compare.py names figures by the same paths; a figure with
a spread is its median. A whole block of text follows its comment, as `<!-- demo: screen -->`, and so does a table of a
record's rows (harness/row_tables.py). Ends with code 1 and a line for each figure that differs; `--fix` writes the
records' figures, and keeps in benchmarks/results the rows that documents show now (harness/shown.py).
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.harness import row_tables
from benchmarks.harness.compare import named
from benchmarks.harness.places import DOCUMENTS, ROOT, names, record_of, whole_record_of
from benchmarks.harness.record import write
from benchmarks.harness.shown import BLOCK, MARK, committed, shown


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
        for line, there in zip_longest(true.split("\n"), found["shown"].split("\n")):
            if line != there:
                said.append(f"{found['name']}: {place} is {line}, shown is {there}")
        return text[found.start() : found.start("shown")] + true + text[found.end("shown") : found.end()]

    for mark in (BLOCK, MARK, row_tables.COMMENT):
        text = mark.sub(replaced, text)
    return text, said


def read_records() -> dict[str, Any]:
    """Returns all committed records: `name` and `name.full` -> record."""
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, (path, _) in _paths().items() if path.exists()}


def _paths() -> dict[str, tuple[Path, Path]]:
    """Returns `name` and `name.full` -> (the committed record, the one with all rows)."""
    sizes = (("default", ""), ("full", ".full"))
    return {f"{one}{end}": (record_of(one, size), whole_record_of(one, size)) for one in names() for size, end in sizes}


def whole(name: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the record with all rows if this machine has it, else the record itself."""
    path = _paths()[name][1]
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else record
    return found if (found["commit"], found["date"]) == (record["commit"], record["date"]) else record


def main() -> int:
    """Checks all documents, or writes their figures and keeps the rows that they show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="write the records' figures, and keep the rows in use")
    fix = parser.parse_args().fix
    records, texts, wrong = read_records(), list[str](), 0
    if fix:
        records = {name: whole(name, record) for name, record in records.items()}
    for path in DOCUMENTS:
        text, said = checked(path.read_text(encoding="utf-8"), records)
        texts.append(text)
        if fix:
            path.write_text(text, encoding="utf-8")
            said = [sentence for sentence in said if "in no record" in sentence]
        print(*(f"{path.relative_to(ROOT)}: {sentence}" for sentence in said), sep="\n", end="\n" if said else "")
        wrong += len(said)
    if fix:
        asked = shown(texts)
        for name, record in records.items():
            write(_paths()[name][0], committed(record, asked.get(name)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
