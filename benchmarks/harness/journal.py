"""Checks that each entry of docs/experiments/ gives its answer and lets a reader reproduce its figures.

    python -m benchmarks.harness.journal [--fix]

harness/entries.py shows the form of an entry. It needs a disposition and an answer, an id that no other has, a command,
and the commit that brought it, and with it the code that gave the figures; the latest entries may still wait for their
commit. Pages have the newest entry first. A benchmark that an entry calls must exist with the named options. An entry
that no command reproduces says `No command`. `--fix` adds the commits that git knows and the next free ids, and writes
the table of the index. Ends with code 1 and a line for each complaint.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from benchmarks.harness.benchmark import SIZES
from benchmarks.harness.entries import DISPOSITIONS, FOLDER, HEADING, INDEX, Entry, entries_of, read_pages, strays
from benchmarks.harness.entry_index import with_index
from benchmarks.harness.places import BENCHMARKS, ROOT
from coldpress.schemas.errors import ColdpressError

COMMAND = re.compile(r"(?:python -m|snakemake|coldpress|pytest) |No command")
CALL = re.compile(r"python -m benchmarks\.(?P<name>[a-z]\w*)\b(?!\.\w)(?P<words>[^`|\n]*)")
FLAG = re.compile(r"--(?:no-)?(?P<name>[a-z][a-z-]*)")
OPTION = re.compile(r"^    (\w+): .* = option\(", re.MULTILINE)
GONE = dict.fromkeys(("planes", "decode_planes", "graded", "self_draft"), "64954923")
"""Benchmarks that went with what they measured, and the last commit that has them, which the pages say."""
OF_ALL = frozenset((*SIZES, "record", "fresh", "help"))


def complaints(pages: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence for each entry that lacks something or is out of place; `pages` is topic -> text."""
    entries = {page: entries_of(page, text) for page, text in pages.items()}
    for page, found in entries.items():
        yield from (f"{page}.md: {line!r} is no heading of an entry" for line in strays(pages[page]))
        yield from (f"{entry.title}: {said}" for entry in found for said in _lacks(entry))
        yield from _out_of_order(found)
    ids = Counter(entry.id for found in entries.values() for entry in found if entry.id)
    yield from (f"{name}: {count} entries have this id" for name, count in ids.items() if count > 1)


def _lacks(entry: Entry) -> Iterator[str]:
    """Yields what is missing or wrong in one entry."""
    if not entry.id:
        yield "no id; --fix adds it"
    elif not re.fullmatch(rf"{entry.page}-\d\d+", entry.id):
        yield f"its id is {entry.id}, and must be {entry.page}-NN on this page"
    if entry.disposition not in DISPOSITIONS:
        shown = ", ".join(f"**{disposition}** — answer." for disposition in DISPOSITIONS)
        yield f"no disposition and answer; begin it with one of {shown}"
    elif not entry.answer.endswith("."):
        yield "its answer must end with a full stop, and an empty line must follow"
    if not COMMAND.search(entry.text):
        yield "no command; name it, or say `No command` and why"
    yield from (said for call in CALL.finditer(entry.text) if (said := _unknown(**call.groupdict())))


def _unknown(name: str, words: str) -> str | None:
    """Returns what a call names that does not exist; None if all exists."""
    path = BENCHMARKS / f"{name}.py"
    if not path.exists():
        return None if name in GONE else f"there is no benchmarks.{name}"
    known = OF_ALL | {option.replace("_", "-") for option in OPTION.findall(path.read_text(encoding="utf-8"))}
    gone = [flag for flag in FLAG.findall(words) if flag not in known]
    return f"benchmarks.{name} has no option {', '.join(gone)}" if gone else None


def _out_of_order(entries: list[Entry]) -> Iterator[str]:
    """Yields the entries of a page that are newer than the one above, or have no commit although it has one."""
    for above, entry in pairwise(entries):
        if entry.date > above.date:
            yield f"{entry.title}: it is newer than the entry above it, of {above.date}"
        if above.commit and not entry.commit:
            yield f"{entry.title}: no commit; --fix adds it"


def fixed(page: str, text: str, first: Mapping[str, str]) -> str:
    """Returns a page whose entries have an id and, if `first` has it, title -> commit, their commit."""
    entries = entries_of(page, text)
    last = max((int(entry.id.rpartition("-")[2]) for entry in entries if entry.id[-1:].isdigit()), default=0)
    for entry in reversed(entries):
        last += not entry.id
        commit = entry.commit or first.get(entry.title)
        heading = f"## {entry.title}{f' · {commit}' if commit else ''} {{ #{entry.id or f'{page}-{last:02}'} }}"
        text = text.replace(f"{entry.heading}\n", f"{heading}\n", 1)
    return text


def first_commits() -> dict[str, str]:
    """Returns title -> the commit that first brought it to docs/experiments/; what is not committed has none."""
    folder = str(FOLDER.relative_to(ROOT))
    command = ["git", "log", "--reverse", "--patch", "--unified=0", "--format=commit %h", "--", folder]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    commit = ""
    for line in told.splitlines():
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif line.startswith("+") and (heading := HEADING.fullmatch(line[1:])):
            found.setdefault(heading["title"], commit)
    return found


def fix(folder: Path, first: Mapping[str, str]) -> None:
    """Writes the pages with commits and ids, and the index."""
    for page, text in read_pages(folder).items():
        (folder / f"{page}.md").write_text(fixed(page, text, first), encoding="utf-8")
    index = folder / INDEX
    index.write_text(with_index(index.read_text(encoding="utf-8"), read_pages(folder)), encoding="utf-8")


def all_complaints(folder: Path = FOLDER) -> list[str]:
    """Returns the complaints about all pages, and one if the index is not made from them."""
    pages = read_pages(folder)
    index = (folder / INDEX).read_text(encoding="utf-8")
    said = list(complaints(pages))
    return said if with_index(index, pages) == index else [*said, f"{INDEX} is not up to date; --fix writes it"]


def main() -> int:
    """Checks the pages, or adds what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="add commits and ids, and write the index")
    try:
        if parser.parse_args().fix:
            fix(FOLDER, first_commits())
        said = all_complaints()
    except ColdpressError as error:
        parser.exit(2, f"{error}\n")
    print(*said, sep="\n", end="\n" if said else "")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
