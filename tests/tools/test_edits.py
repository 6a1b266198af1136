"""The list of edits is true: each one applies to the code as it is, and names tests that exist."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.data import ROOT
from tools.mutants.edits import Edit, ListError, check, read_edits


def test_every_edit_applies_and_names_its_tests() -> None:
    for edit in read_edits():
        check(edit, ROOT)


def test_there_are_enough_of_them_everywhere() -> None:
    edits = read_edits()
    tops = Counter(edit.file.split("/")[0] for edit in edits)
    assert len(edits) >= 120
    assert tops["rules"] + tops["Snakefile"] >= 20
    assert sum(edit.file.startswith(("compiler/stages/verify", "compiler/stages/package")) for edit in edits) >= 20
    assert sum(edit.native for edit in edits) >= 10


def test_a_list_that_is_not_true_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("first = 1\nsecond = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_code.py").write_text("def test_it():\n    pass\n")
    fields = ("a", "code.py", "test_code.py::test_it", "first = 1", "first = 2")

    def listed(*lines: tuple[str, ...]) -> list[Edit]:
        path = tmp_path / "edits.tsv"
        path.write_text("# a heading\n" + "".join("\t".join(line) + "\n" for line in lines))
        return read_edits(path)

    (edit,) = listed(fields)
    check(edit, tmp_path)
    assert edit.applied("first = 1\n") == "first = 2\n"
    for place, text, message in (
        (1, "gone.py", "occurs 0 times in gone.py"),
        (3, "= 1", "occurs 2 times"),
        (4, "first = 1", "a replacement that differs"),
        (4, "first = (", "would not be Python"),
        (2, "test_gone.py", "there is no tests/test_gone.py"),
        (2, "test_code.py::test_gone", "there is no tests/test_code.py::test_gone"),
    ):
        (edit,) = listed((*fields[:place], text, *fields[place + 1 :]))
        with pytest.raises(ListError, match=message):
            check(edit, tmp_path)
    with pytest.raises(ListError, match="line 2: 4 fields"):
        listed(fields[:4])
    with pytest.raises(ListError, match="line 3: the name a occurs twice"):
        listed(fields, fields)
