"""Makes the table of docs/experiments/index.md from the entries of its pages: a section for each topic."""

import re
from collections import Counter
from collections.abc import Mapping

from benchmarks.harness.entries import DISPOSITIONS, Entry, entries_of
from coldpress.schemas.errors import ColdpressError

BEGIN, END = "<!-- made from the pages -->", "<!-- end of what is made -->"
BLOCK = re.compile(f"(?<={BEGIN}\n).*(?={END})", re.DOTALL)
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
COLUMNS = "| id | date | question | disposition | answer |\n|---|---|---|---|---|\n"


def with_index(text: str, pages: Mapping[str, str]) -> str:
    """Returns the index page with the table of these pages, topic -> text.

    Raises:
        ColdpressError: if the index page has no place for it.
    """
    if not BLOCK.search(text):
        raise ColdpressError(f"docs/experiments/index.md needs a line {BEGIN} and, after it, a line {END}")
    entries = {page: entries_of(page, written) for page, written in pages.items()}
    made = [_counts([entry for found in entries.values() for entry in found])]
    made += [_topic(page, pages[page], found) for page, found in entries.items()]
    return BLOCK.sub(lambda _: "\n" + "\n".join(made) + "\n", text)


def _counts(entries: list[Entry]) -> str:
    """Returns what each disposition means, and how many entries have it."""
    counted = Counter(entry.disposition for entry in entries)
    rows = (f"| {name.lower()} | {meaning} | {counted[name]} |\n" for name, meaning in DISPOSITIONS.items())
    return f"| disposition | means | entries, {len(entries)} in all |\n|---|---|---|\n{''.join(rows)}"


def _topic(page: str, text: str, entries: list[Entry]) -> str:
    title = TITLE.search(text)
    rows = "".join(_row(entry) for entry in entries)
    return f"## [{title[1] if title else page}]({page}.md)\n\n{COLUMNS}{rows}"


def _row(entry: Entry) -> str:
    link = f"[{entry.id}]({entry.page}.md#{entry.id})"
    cells = (link, entry.date, entry.question, entry.disposition.lower(), entry.answer)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"
