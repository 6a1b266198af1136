"""Reads the list of edits (edits.tsv): plausible mistakes, one a line, each with the tests that should notice it.

A line has five fields, separated by tabs: a name, a file, the tests (files or single tests below tests/, separated by
spaces), a text that occurs exactly once in the file, and its replacement; \\n in the last two is a line break. Lines
that begin with # are headings.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("edits.tsv")
NATIVE = "runtime/native/"
"""Edits of files below this folder need a build of the native core."""


class ListError(ValueError):
    """Raised if the list does not fit the files; the text is one sentence that names the edit or its line."""


@dataclass(frozen=True)
class Edit:
    """One plausible mistake."""

    name: str
    file: str
    tests: tuple[str, ...]
    pattern: str
    replacement: str

    @property
    def native(self) -> bool:
        """Whether it takes effect only after a build of the native core."""
        return self.file.startswith(NATIVE)

    def applied(self, text: str) -> str:
        """Returns the file's `text` with the mistake in it."""
        return text.replace(self.pattern, self.replacement)


def read_edits(path: Path = LIST) -> list[Edit]:
    """Returns all edits, in the order of the list.

    Raises:
        ListError: if a line does not have five fields, none of them empty, or a name occurs twice.
    """
    edits: list[Edit] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        fields = line.split("\t")
        if len(fields) != 5 or not all(fields):
            raise ListError(f"{path.name}, line {number}: {len(fields)} fields, expected five, none of them empty")
        name, file, tests, *texts = fields
        pattern, replacement = (text.replace("\\n", "\n") for text in texts)
        if any(edit.name == name for edit in edits):
            raise ListError(f"{path.name}, line {number}: the name {name} occurs twice, expected it once")
        edits.append(Edit(name, file, tuple(f"tests/{test}" for test in tests.split()), pattern, replacement))
    return edits


def check(edit: Edit, root: Path) -> None:
    """Checks an edit against the files of a checkout.

    Raises:
        ListError: if its pattern does not occur exactly once, the edited file is not Python, or a test does not exist.
    """
    path = root / edit.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(edit.pattern) != 1 or edit.pattern == edit.replacement:
        raise ListError(
            f"{edit.name}: '{edit.pattern}' occurs {text.count(edit.pattern)} times in {edit.file}, expected once, and "
            "a replacement that differs from it; change the line in tools/mutants/edits.tsv"
        )
    if path.suffix == ".py":
        try:
            ast.parse(edit.applied(text))
        except SyntaxError as error:
            raise ListError(f"{edit.name}: {edit.file} would not be Python ({error}), expected valid code") from error
    for test in edit.tests:
        file, _, name = test.partition("::")
        found = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else None
        if found is None or (name and not re.search(rf"^def {name.partition('[')[0]}\(", found, re.MULTILINE)):
            raise ListError(f"{edit.name}: there is no {test}; name the test that notices the edit")
