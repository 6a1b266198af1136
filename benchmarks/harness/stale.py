"""Prints which records are of code or data that has changed since, for the workflow of the benchmarks.

    python -m benchmarks.harness.stale

Prints a line for each benchmark without a record, and for each whose inputs have changed, with those inputs.
"""

import json
import os
import sys
from pathlib import Path

from benchmarks.harness.inputs import changed, digest_of
from benchmarks.harness.places import WORK, names, record_of

LONG_AGO_S = 1


def reasons(name: str, size: str = "default") -> list[str]:
    """Returns why a record does not hold: the changed inputs, or that there is none. Empty means that it holds."""
    path = record_of(name, size)
    if not path.exists():
        return ["no record"]
    return changed(json.loads(path.read_text(encoding="utf-8"))["inputs"])


def inputs_file(name: str, size: str = "default") -> Path:
    """Writes the file that stands for a record's inputs, and returns its path.

    Snakemake compares times, which a clone does not keep. This file is older than any record while its inputs are
    unchanged, and otherwise as old as the change that it notes.
    """
    path = WORK / "inputs" / f"{name}.{size}.txt"
    found = reasons(name, size)
    text = "".join(f"{one} {digest_of(one)}\n" for one in found)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if not found:
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    return path


def main() -> int:
    """Prints what is stale; ends with 1 if anything is."""
    found = {name: why for name in names() if (why := reasons(name))}
    for name, why in found.items():
        print(f"{name}: {', '.join(why)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
