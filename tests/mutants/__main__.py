"""Whether the tests notice mistakes: applies each edit of tests/mutants/edits.tsv to a copy of the checkout, one at a
time, and runs the tests that are expected to fail.

First all of those tests are run without any edit: they must pass. A line is printed per edit, with the first test that
failed; the last line is one JSON object, {"noticed", "total", "unnoticed"}. Ends with code 1 if fewer than 95 % were.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.edits import Edit, ListError, check, read_edits
from tests.mutants.trees import Outcome, ToolError, Tree
from tests.support.data import ROOT

ENOUGH = 0.95
BASELINE = "no edit"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = _parser().parse_args(argv)
    try:
        edits = [edit for edit in read_edits() if _wanted(edit, options)]
        if not edits:
            raise ListError("no edit has such a name or lies in such a folder; see tests/mutants/edits.tsv")
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
    return 0 if len(noticed) >= ENOUGH * len(edits) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="an edit's name, or its beginning; may repeat")
    parser.add_argument("--folder", action="append", metavar="PATH", help="edits of files below this; may repeat")
    parser.add_argument("--list", action="store_true", help="print the edits and try none")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="edits tried side by side (default: 1)")
    parser.add_argument("--whole", action="store_true", help="run the whole suite before an edit counts as unnoticed")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep outcomes here, and take those of an earlier run of this tree"
    )
    parser.add_argument("--timeout", type=int, default=120, metavar="S", help="seconds of each test (default: 120)")
    return parser


def _wanted(edit: Edit, options: argparse.Namespace) -> bool:
    named = not options.only or any(edit.name.startswith(name) for name in options.only)
    placed = not options.folder or any(edit.file.startswith(folder) for folder in options.folder)
    return named and placed


class _Outcomes:
    """What has been tried, in a file if one is given: it holds for one state of the checkout's files."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._tree, self._found = path, _tree_digest(), {}
        if path and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                if entry["tree"] == self._tree:
                    self._found[entry["name"]] = Outcome(**entry["outcome"])

    def get(self, name: str) -> Outcome | None:
        return self._found.get(name)

    def add(self, name: str, outcome: Outcome) -> None:
        self._found[name] = outcome
        if self._path:
            with self._path.open("a") as file:
                print(json.dumps({"tree": self._tree, "name": name, "outcome": vars(outcome)}), file=file)


def _tree_digest() -> str:
    """Digest of the checkout's files, new ones included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256()
    for name in sorted(set(filter(None, listed.split("\0")))):
        if (ROOT / name).is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return digest.hexdigest()


def _try_all(edits: list[Edit], options: argparse.Namespace) -> set[str]:
    """Names of the edits that were noticed."""
    outcomes = _Outcomes(options.resume)
    left = [edit for edit in edits if outcomes.get(edit.name) is None]
    trees: SimpleQueue[Tree] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="coldpress-mutants-") as scratch, ThreadPoolExecutor(options.jobs) as jobs:
        native = any(edit.native for edit in left)
        for number in range(min(options.jobs, len(left))):
            trees.put(Tree(_made(Path(scratch) / str(number)), native, options.timeout))

        def tried(edit: Edit) -> Outcome:
            found = outcomes.get(edit.name)
            if found is None:
                tree = trees.get()
                try:
                    found = _try(tree, edit, options.whole)
                finally:
                    trees.put(tree)
                outcomes.add(edit.name, found)
            return found

        if left:
            _check_baseline(trees, left, outcomes)
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


def _check_baseline(trees: "SimpleQueue[Tree]", edits: list[Edit], outcomes: _Outcomes) -> None:
    """Without an edit all tests pass: what fails anyway would seem to notice everything."""
    tests = sorted({test for edit in edits for test in edit.tests})
    name = f"{BASELINE}: {hashlib.sha256(' '.join(tests).encode()).hexdigest()[:12]}"
    if outcomes.get(name):
        return
    tree = trees.get()
    outcome = tree.run(tests, to_the_end=True)
    trees.put(tree)
    if not outcome.passed:
        raise ToolError(f"without any edit these tests fail: {outcome.by}; expected all to pass: mend them first")
    print(f"without an edit {len(tests)} files and tests pass, in {outcome.seconds:.0f} s", flush=True)
    outcomes.add(name, outcome)


def _try(tree: Tree, edit: Edit, whole: bool) -> Outcome:
    with tree.edited(edit):
        outcome = tree.run(edit.tests, edit)
        return tree.run(("tests",), edit) if outcome.passed and whole else outcome


if __name__ == "__main__":
    sys.exit(main())
