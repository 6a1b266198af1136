"""Reads the entries of docs/experiments/, which has a page for each topic. An entry is

    ## YYYY-MM-DD · the question · commit { #topic-NN }

    **Disposition** — the answer in one sentence.

    What was run, the figures, and what follows from them.

Commit and id may still be missing; harness/journal.py adds both. A line that begins with `## ` and is no such heading
is no entry.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.places import ROOT

FOLDER = ROOT / "docs" / "experiments"
INDEX = "index.md"
DISPOSITIONS: Mapping[str, str] = {
    "Accepted": "what was tried is in the product today, or the figures support what the product does",
    "Conditional": "it pays only where a condition holds; the answer says where",
    "Rejected": "it was tried and not taken",
    "Reversed": "it was taken once and later undone",
}
SECTION = re.compile(r"^## .*$", re.MULTILINE)
HEADING = re.compile(
    r"## (?P<title>(?P<date>\d{4}-\d\d-\d\d) · (?P<question>.*?))"
    r"(?: · (?P<commit>[0-9a-f]{7,40}))?(?: \{ #(?P<id>\S+) \})?"
)
ANSWER = re.compile(r"\s*\*\*(?P<disposition>\w+)\*\* — (?P<answer>.+?)\s*(?:\n\n|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """One experiment; what its page does not say is empty."""

    page: str
    heading: str
    title: str
    date: str
    question: str
    commit: str
    id: str
    disposition: str
    answer: str
    text: str


def read_pages(folder: Path = FOLDER) -> dict[str, str]:
    """Returns topic -> text of its page, sorted by topic."""
    paths = sorted(path for path in folder.glob("*.md") if path.name != INDEX)
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def entries_of(page: str, text: str) -> list[Entry]:
    """Returns the entries of a page in its order."""
    found = list(SECTION.finditer(text))
    ends = [one.start() for one in found[1:]] + [len(text)]
    read = [(HEADING.fullmatch(one[0]), text[one.end() : end]) for one, end in zip(found, ends, strict=True)]
    return [_entry(page, heading, body) for heading, body in read if heading]


def _entry(page: str, heading: re.Match[str], text: str) -> Entry:
    answer = ANSWER.match(text)
    said = answer.groupdict() if answer else {"disposition": "", "answer": ""}
    said["answer"] = " ".join(said["answer"].split())
    return Entry(page=page, heading=heading[0], text=text, **heading.groupdict(""), **said)


def strays(text: str) -> list[str]:
    """Returns the headings of a page that are no entry's."""
    return [line for line in SECTION.findall(text) if not HEADING.fullmatch(line)]
