"""Compares output that a page shows with what its commands print.

Words, names and lines must be equal. A figure stands for any figure, with any unit of its kind, because many of them
are seconds or depend on the machine's load; a digest stands for any digest, and spaces between columns for any number
of spaces. A line `...` stands for any lines.
"""

import difflib
import re

ANY_LINES = "..."
PLAIN = (
    (re.compile(r"[ \t]*\n[ \t]{24,}(?=\S)"), " "),  # the next line of a table's last column
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,64}\b"), "DIGEST"),
    (re.compile(r"(?<![\w.])[-+−]?\d[\d,_]*(?:\.\d+)*(?:e[-+]?\d+)?"), "N"),
    (re.compile(r"\bN (?:[kMGT]i?)?B\b"), "N bytes"),
    (re.compile(r"\bN (?:ns|us|µs|ms|s|min|h)\b"), "N s"),
    (re.compile(r"\bN(?:bytes|s)\b"), "N"),
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r"[─━-]{3,}"), "---"),
)
"""What is replaced before lines are compared, in this order."""


def plain(text: str) -> list[str]:
    """Returns the lines of a text as they are compared, without empty ones at its ends."""
    for found, put in PLAIN:
        text = found.sub(put, text)
    return "\n".join(line.strip() for line in text.splitlines()).strip("\n").splitlines()


def difference(shown: str, printed: str) -> str:
    """Returns how what a page shows differs from what was printed, as a diff; empty if it does not."""
    expected, real = plain(shown), plain(printed)
    if _matches(expected, real):
        return ""
    return "\n".join(difflib.unified_diff(expected, real, "shown", "printed", lineterm=""))


def _matches(expected: list[str], real: list[str]) -> bool:
    parts = ["(?:.*\n)*" if line == ANY_LINES else re.escape(line) + "\n" for line in expected]
    return re.fullmatch("".join(parts), "".join(line + "\n" for line in real)) is not None
