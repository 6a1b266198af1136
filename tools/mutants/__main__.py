"""Counts the mistakes that the tests notice: applies each edit of tools/mutants/edits.tsv to a copy of the checkout,
one at a time, and runs the tests that should fail.

First all these tests run without any edit and must pass. Each edit prints a line with the first test that failed; the
last line is one JSON object, {"noticed", "total", "unnoticed"}. The exit code is 1 if fewer than 98 % were noticed, or
with --fast, which runs only the tests of `make test`, fewer than 90 %.
"""

import argparse
import functools
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.support.data import ROOT
from tools.mutants.edits import Edit, ListError, check, read_edits
from tools.mutants.trees import Outcome, ToolError, Tree

ENOUGH, ENOUGH_FAST = 0.98, 0.9


def main(argv: Sequence[str] | None = None) -> int:
    """Tries the edits of the command line; returns 0 if enough of them were noticed, 1 if not, 2 for an error."""
    options = _parser().parse_args(argv)
    try:
        edits = [edit for edit in read_edits() if _wanted(edit, options)]
        if not edits:
            raise ListError("no edit has such a name or lies in such a folder; see tools/mutants/edits.tsv")
        for edit in edits:
            check(edit, ROOT)
        if options.list:
            print(*(f"{edit.name}\t{edit.file}" for edit in edits), sep="\n")
            return 0
        noticed = _try_all(edits, options)
    except (ListError, ToolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    unnoticed = [edit.name for edit in edits if edit.name not in noticed]
    print(json.dumps({"noticed": len(noticed), "total": len(edits), "unnoticed": unnoticed}))
    return 0 if len(noticed) >= (ENOUGH_FAST if options.fast else ENOUGH) * len(edits) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="an edit's name, or its beginning; may repeat")
    parser.add_argument("--folder", action="append", metavar="PATH", help="edits of files below this; may repeat")
    parser.add_argument("--list", action="store_true", help="print the edits and try none")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="edits tried at the same time (default: 1)")
    parser.add_argument("--fast", action="store_true", help="run only tests that `make test` runs")
    parser.add_argument("--whole", action="store_true", help="run the whole suite before an edit counts as unnoticed")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep outcomes in FILE, and reuse those of edits whose file and tests have not changed since",
    )
    parser.add_argument("--no-baseline", action="store_true", help="assume that the tests pass without any edit")
    parser.add_argument("--timeout", type=int, default=300, metavar="S", help="seconds for each test (default: 300)")
    return parser


def _wanted(edit: Edit, options: argparse.Namespace) -> bool:
    named = not options.only or any(edit.name.startswith(name) for name in options.only)
    placed = not options.folder or any(edit.file.startswith(folder) for folder in options.folder)
    return named and placed


class _Outcomes:
    """Outcomes by edit, kept in a file if one is given; one holds as long as the edit's file and tests are the same."""

    def __init__(self, path: Path | None, fast: bool) -> None:
        self._path, self._fast, self._found = path, fast, {}
        if path and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._found[entry["key"]] = Outcome(**entry["outcome"])

    def get(self, edit: Edit) -> Outcome | None:
        return self._found.get(_key(edit, self._fast))

    def add(self, edit: Edit, outcome: Outcome) -> None:
        key = _key(edit, self._fast)
        self._found[key] = outcome
        if self._path:
            with self._path.open("a") as file:
                print(json.dumps({"key": key, "name": edit.name, "outcome": vars(outcome)}), file=file)


@functools.cache
def _key(edit: Edit, fast: bool) -> str:
    """Returns a digest of an edit, its file, and the files of its tests, as they were at the start."""
    files = (edit.file, *(test.partition("::")[0] for test in edit.tests))
    contents = [hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in files]
    return hashlib.sha256(json.dumps([*vars(edit).values(), contents, fast]).encode()).hexdigest()


def _try_all(edits: list[Edit], options: argparse.Namespace) -> set[str]:
    """Tries the edits and returns the names of those that were noticed."""
    outcomes = _Outcomes(options.resume, options.fast)
    left = [edit for edit in edits if outcomes.get(edit) is None]
    trees: SimpleQueue[Tree] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="coldpress-mutants-") as scratch, ThreadPoolExecutor(options.jobs) as jobs:
        native = any(edit.native for edit in left)
        for number in range(min(options.jobs, len(left))):
            trees.put(Tree(_made(Path(scratch) / str(number)), native, options.timeout, options.fast))

        def tried(edit: Edit) -> Outcome:
            found = outcomes.get(edit)
            if found is None:
                tree = trees.get()
                try:
                    found = _try(tree, edit, options.whole)
                finally:
                    trees.put(tree)
                outcomes.add(edit, found)
            return found

        if left and not options.no_baseline:
            _check_baseline(trees, left)
        noticed: set[str] = set()
        for edit, outcome in zip(edits, jobs.map(tried, edits), strict=True):
            word = "unnoticed" if outcome.passed else "noticed"
            print(f"{word:<9}  {edit.name:<44}  {edit.file:<40}  {outcome.seconds:6.1f} s  {outcome.by}", flush=True)
            if not outcome.passed:
                noticed.add(edit.name)
    return noticed


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _check_baseline(trees: "SimpleQueue[Tree]", edits: list[Edit]) -> None:
    """Checks that all tests pass without an edit: a test that always fails would seem to notice everything."""
    tests = sorted({test for edit in edits for test in edit.tests})
    tree = trees.get()
    outcome = tree.run(tests, to_the_end=True)
    trees.put(tree)
    if not outcome.passed:
        raise ToolError(f"without any edit these tests fail: {outcome.by}; expected all to pass: fix them first")
    print(f"without an edit {len(tests)} files and tests pass, in {outcome.seconds:.0f} s", flush=True)


def _try(tree: Tree, edit: Edit, whole: bool) -> Outcome:
    with tree.edited(edit):
        outcome = tree.run(edit.tests)
        return tree.run(("tests",)) if outcome.passed and whole else outcome


if __name__ == "__main__":
    sys.exit(main())
