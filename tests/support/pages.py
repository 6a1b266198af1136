"""Reads the commands of a page in Markdown, and the output that the page shows.

    ```sh          commands, run in bash in the order of the page
    ```python      a script, run with Python
    ```text        what the commands before it print; a line `...` stands for any lines
    ```yaml title="builds.yaml"    a file, written before the commands after it run

Other blocks are only shown. `<!-- not run: reason -->` before a block exempts it.
"""

import re
from dataclasses import dataclass

from markdown_it import MarkdownIt

RUN = ("sh", "python")
"""Kinds of blocks that are run."""
SHOWN = ("yaml", "json", "jinja")
"""Kinds of blocks that are only shown, or written where they have a title."""
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->")
TITLE = re.compile(r'title="(?P<name>[^"]+)"')


class PageError(ValueError):
    """A page that does not say what its blocks are."""


@dataclass(frozen=True)
class Step:
    """A block that is run or written."""

    kind: str
    text: str
    line: int
    """Of the page, from 1."""
    title: str = ""
    """The file that is written."""
    exempt: str = ""
    """Why it is not run."""
    shown: str | None = None
    """What the page says that it prints; None for nothing."""


def steps(page: str) -> list[Step]:
    """Returns what is run or written, in the order of the page.

    Raises:
        PageError: for a block of no known kind, or output without commands.
    """
    found: list[Step] = []
    exempt = ""
    for token in MarkdownIt().parse(page):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            said = NOT_RUN.search(token.content)
            exempt = said["reason"] if said else exempt
        elif token.type in ("fence", "code_block"):
            kind, _, more = token.info.strip().partition(" ")
            if kind == "text":
                _show(found, token.content, line)
            elif kind in RUN:
                found.append(Step(kind, token.content, line, exempt=exempt))
            elif kind not in SHOWN:
                raise PageError(f"line {line}: a block of the kind {kind!r}, expected {', '.join((*RUN, *SHOWN))}")
            elif title := TITLE.search(more):
                found.append(Step(kind, token.content, line, title=title["name"], exempt=exempt))
            exempt = ""
    return found


def _show(found: list[Step], text: str, line: int) -> None:
    """Gives the last step its output."""
    if not found or found[-1].kind not in RUN or found[-1].shown is not None:
        raise PageError(f"line {line}: output without commands before it")
    last = found.pop()
    found.append(Step(last.kind, last.text, last.line, last.title, last.exempt, text))
