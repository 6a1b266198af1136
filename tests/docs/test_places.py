"""Places in the code that the pages name exist: `path`, or `path:name` of a function, a class or one of its methods."""

import ast
import re
from functools import cache

import pytest

from tests.support.data import ROOT

JOURNAL = "docs/experiments/"
"""Its entries name what was there when they were written."""
FOUND = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", *(page for page in FOUND if not page.startswith(JOURNAL)))
TOPS = (
    "benchmarks",
    "coldpress",
    "compiler",
    "demo",
    "docs",
    "profiles",
    "rules",
    "runtime",
    "schemas",
    "tests",
    "tools",
)
PLACE = re.compile(rf"`(?P<path>(?:{'|'.join(TOPS)})/[\w./-]*)(?::(?P<name>[\w.]+))?`")
PAPERS = ("activeflow", "dip", "llm-in-a-flash", "powerinfer", "ripple")
LEAST_PLACES = 8
"""On a page about a paper."""


def places(text: str) -> list[tuple[str, str]]:
    """Returns (path, name or an empty text) of each place that a text names."""
    return [(found["path"], found["name"] or "") for found in PLACE.finditer(text)]


@cache
def names_in(path: str) -> frozenset[str]:
    """Returns what a module defines, and methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            names |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return frozenset(names)


def missing(text: str) -> list[str]:
    """Returns the places that do not exist."""
    return [
        f"{path}:{name}" if name else path
        for path, name in places(text)
        if not (ROOT / path).exists() or (name and name not in names_in(path))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    assert missing((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_about_a_paper_names_where_its_mechanisms_are(paper: str) -> None:
    found = places((ROOT / "docs" / "explanation" / f"{paper}.md").read_text(encoding="utf-8"))
    assert len({path for path, name in found if name}) >= LEAST_PLACES


def test_a_place_that_is_gone_is_noticed() -> None:
    text = "`runtime/cache/lfu.py:Plugin`, `runtime/cache/gone.py`, `runtime/cache/lfu.py:gone`, `docs/`, `a/b.py`"
    assert missing(text) == ["runtime/cache/gone.py", "runtime/cache/lfu.py:gone"]
    assert missing("`runtime/cache/lfu.py:Plugin.admit` and `runtime/cache/lfu.py:Plugin.gone`") == [
        "runtime/cache/lfu.py:Plugin.gone"
    ]
