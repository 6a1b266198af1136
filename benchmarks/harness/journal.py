"""Checks that each entry of EXPERIMENTS.md lets a reader reproduce its figures: it needs a command and a commit.

    python -m benchmarks.harness.journal [--fix]

A heading ends with the commit that brought its entry, and with it the code that gave the figures; `--fix` adds the
commits that git knows. The latest entries may still wait for theirs. A benchmark that an entry calls must exist with
the named options. An entry that no command reproduces says `No command`. Ends with code 1 and a line for each
complaint.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.benchmark import SIZES
from benchmarks.harness.places import BENCHMARKS, ROOT

JOURNAL = ROOT / "EXPERIMENTS.md"
HEADING = re.compile(r"^## (?P<title>\d{4}-\d\d-\d\d · .*?)(?P<commit> · [0-9a-f]{7,40})?$", re.MULTILINE)
COMMAND = re.compile(r"(?:python -m|snakemake|coldpress|pytest) |No command")
CALL = re.compile(r"python -m benchmarks\.(?P<name>[a-z]\w*)(?P<words>[^`|\n]*)")
FLAG = re.compile(r"--(?:no-)?(?P<name>[a-z][a-z-]*)")
OPTION = re.compile(r"^    (\w+): .* = option\(", re.MULTILINE)
OF_ALL = frozenset((*SIZES, "record", "fresh", "help"))


def complaints(text: str) -> Iterator[str]:
    """Yields a sentence for each entry that lacks something."""
    found = list(HEADING.finditer(text))
    dated = next((number for number, one in enumerate(found) if one["commit"]), len(found))
    for number, one in enumerate(found):
        end = found[number + 1].start() if number + 1 < len(found) else len(text)
        entry, title = text[one.end() : end], one["title"]
        if not COMMAND.search(entry):
            yield f"{title}: no command; name it, or say `No command` and why"
        if number > dated and not one["commit"]:
            yield f"{title}: no commit; --fix adds it"
        yield from (f"{title}: {said}" for call in CALL.finditer(entry) if (said := _unknown(**call.groupdict())))


def _unknown(name: str, words: str) -> str | None:
    """Returns what a call names that does not exist; None if all exists."""
    path = BENCHMARKS / f"{name}.py"
    if not path.exists():
        return f"there is no benchmarks.{name}"
    known = OF_ALL | {option.replace("_", "-") for option in OPTION.findall(path.read_text(encoding="utf-8"))}
    gone = [flag for flag in FLAG.findall(words) if flag not in known]
    return f"benchmarks.{name} has no option {', '.join(gone)}" if gone else None


def with_commits(text: str, first: dict[str, str]) -> str:
    """Returns the journal with the commit of each entry in `first`, title -> commit."""
    return HEADING.sub(lambda one: one[0] if one["commit"] else _with(one[0], first.get(one["title"])), text)


def _with(heading: str, commit: str | None) -> str:
    return f"{heading} · {commit}" if commit else heading


def first_commits() -> dict[str, str]:
    """Returns title -> the commit in which it first stood; entries that are not committed have none."""
    found: dict[str, str] = {}
    for commit in _git("log", "--reverse", "--format=%h", "--", JOURNAL.name).split():
        for one in HEADING.finditer(_git("show", f"{commit}:{JOURNAL.name}")):
            found.setdefault(one["title"], commit)
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(path: Path = JOURNAL) -> int:
    """Checks the journal, or adds commits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="add the commits that brought the entries")
    text = path.read_text(encoding="utf-8")
    if parser.parse_args().fix:
        text = with_commits(text, first_commits())
        path.write_text(text, encoding="utf-8")
    said = list(complaints(text))
    print(*said, sep="\n", end="\n" if said else "")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
