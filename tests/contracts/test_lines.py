"""No package of the product grows unnoticed: pyproject.toml states its lines, and every cut lowers them."""

import os
import tomllib
from pathlib import Path

import pytest

from tests.support.data import ROOT

SOURCES = (".py", ".smk", ".cpp", ".h")
LEFT = 100
"""Lines that a package may have below its number, so that a few lines fewer are no change of pyproject.toml."""
STATED: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coldpress"]["lines"]


def num_lines(package: str) -> int:
    """Lines of a package's source files; links to other packages are not followed."""
    paths = [Path(folder, name) for folder, _, names in os.walk(ROOT / package) for name in names]
    return sum(path.read_bytes().count(b"\n") for path in paths if path.suffix in SOURCES)


@pytest.mark.parametrize("package", STATED)
def test_a_package_has_the_lines_that_are_stated(package: str) -> None:
    found, stated = num_lines(package), STATED[package]
    place = f"{package} has {found} lines, and [tool.coldpress.lines] of pyproject.toml states {stated}"
    assert found <= stated, (
        f"{place}: cut {found - stated} lines elsewhere in it, or raise the number with a line of CHANGELOG.md that "
        "says what a user gets for them"
    )
    assert found > stated - LEFT, f"{place}: lower the number, so that what was cut does not grow again"


def test_every_package_is_stated() -> None:
    links = {path.resolve() for path in (ROOT / "coldpress").iterdir() if path.is_symlink()}
    sources = {path.name for path in links if any(path.rglob("*.py"))}
    assert STATED.keys() == sources | {"coldpress", "rules"}
