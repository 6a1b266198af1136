"""Prints which figures of two records moved by more than their spread.

    python -m benchmarks.harness.compare OLD.json NEW.json

A figure with a spread has moved if the spreads do not overlap. One without has moved if it differs in the first four
significant digits. Rows are matched by their texts, and by their order where texts are equal.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.command import show
from benchmarks.harness.keys import SPREAD
from benchmarks.harness.tables import Table, label_of

DIGITS = 1e-4


def moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns (figure, old, new) of the figures that moved, appeared or disappeared; None is a missing figure. Of rows
    that one of the records has left out (harness/shown.py) nothing is said."""
    before, after = dict(named(old["figures"])), dict(named(new["figures"]))
    left_out = tuple(f"{name}[" for told in (old, new) for name in told.get("left_out", ()))
    names = [*before, *(name for name in after if name not in before)]
    names = [name for name in names if (name in before and name in after) or not name.startswith(left_out)]
    found = [(name, before.get(name), after.get(name)) for name in names]
    return [(name, one, other) for name, one, other in found if differs(one, other)]


def named(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, figure); an object in a list is named by its texts, or by its place if it has none."""
    if isinstance(value, Mapping) and not set(value) >= SPREAD:
        for name, item in value.items():
            yield from named(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        used: dict[str, int] = {}
        for item in value:
            label = label_of(item)
            used[label] = used.get(label, 0) + 1
            yield from named(item, f"{path}[{label}{f'#{used[label]}' if used[label] > 1 or not label else ''}]")
    else:
        yield path, value


def differs(old: Any, new: Any) -> bool:
    """Returns whether a figure has moved."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old["high"] < new["low"] or new["high"] < old["low"]
    numbers = [value for value in (old, new) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == 2:
        return not math.isclose(*numbers, rel_tol=DIGITS)
    return old != new


def main() -> int:
    """Prints a table; ends with 1 if a figure moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (arguments.old, arguments.new))
    found = moved(old, new)
    for told, path in ((old, arguments.old), (new, arguments.new)):
        if told["busy"]:
            print(f"{path}: measured on a busy machine")
    show(Table(f"{new['benchmark']}: {len(found)} figures moved", ("figure", "old", "new"), found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
