"""Writes docs/reference/commands.md: the help of every command, as it is printed at a width of 100 characters.

    python -m tools.command_documents [--fix]

Without `--fix` it ends with code 1 if the file is not up to date.
"""

import os
import sys
from pathlib import Path

from coldpress.cli.main import COMMANDS, FRONT_DOOR, load

FILE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
WIDTH = "100"
HEAD = """# Commands

Made by `python -m tools.command_documents --fix`. The keys of `coldpress build` are
[a page of their own](keys.md).
"""


def document() -> str:
    """Returns the page."""
    os.environ |= {"COLUMNS": WIDTH, "NO_COLOR": "1"}
    found = [HEAD]
    for name in COMMANDS:
        text = _help(name).partition("\nKeys:\n")[0].rstrip()
        found.append(f"## coldpress {name}\n\n```\n{text}\n```\n")
    return "\n".join(found)


def _help(name: str) -> str:
    """Returns the help of a command."""
    parent = FRONT_DOOR.make_context("coldpress", [], resilient_parsing=True)
    command = load(name)
    return command.get_help(command.make_context(name, [], parent=parent, resilient_parsing=True))


def main(argv: list[str]) -> int:
    """Writes or checks the page; returns the exit code."""
    text = document()
    if argv == ["--fix"]:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{FILE} is not up to date; run python -m tools.command_documents --fix", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
