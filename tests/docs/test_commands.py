"""The commands of README and of the tutorials run, and print what the page shows.

Every page has a folder of its own, with links to the checkout and a copy of one build of the demonstration model.
`make test` leaves them out; `.ci/run` runs README.
"""

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks.harness.documents import figure, read_records
from tests.support.data import ROOT
from tests.support.page_shell import Printed, run
from tests.support.pages import RUN, PageError, Step, steps
from tests.support.shown import ANY_LINES, difference, plain
from tests.support.workflow import COPIED, Server, Workflow

PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "tutorials").glob("*.md")))
RAN = [pytest.param(name, marks=pytest.mark.readme if name == "README.md" else ()) for name in PAGES]
EXEMPTIONS = {
    "README.md": [
        "CI runs it, since it downloads a model",
        "it is this test",
        "the weights of a 7B model are downloaded",
    ],
    "docs/tutorials/first-artifact.md": ["CI runs it, since it downloads a model", "they wait for you"],
    "docs/tutorials/own-phone.md": ["it needs a phone"],
    "docs/tutorials/server.md": ["the index of packages is asked"],
}
"""Page -> why blocks of it are not run."""


@pytest.fixture(scope="module")
def demo(tree: Path, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """Builds the demo once.

    Its folder has the depth of the pages' folders: a build that is copied elsewhere finds its inputs at other paths,
    and starts anew.
    """
    if not (tree / "demo").exists():
        (tree / "demo").symlink_to(ROOT / "demo")
    found = Workflow(tree, tmp_path_factory.mktemp("demo"), server, {"model": "relu-demo", "device": "pixel6"})
    found.build()
    return found


@pytest.fixture(scope="module")
def printed_by(demo: Workflow, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Printed]:
    """Returns a function: the name of a page -> what its steps printed. Each page is run once."""

    @cache
    def of(name: str) -> Printed:
        folder = tmp_path_factory.mktemp(Path(name).stem)
        _link_checkout(folder, demo.tree)
        shutil.copytree(demo.folder / "build", folder / "build", symlinks=True)
        given = demo.environment()
        return run(steps_of(name), folder, given | {"PYTHONPATH": f"{given['PYTHONPATH']}{os.pathsep}{demo.tree}"})

    return of


def _link_checkout(folder: Path, tree: Path = ROOT) -> None:
    """Fills a folder with links to what is in the checkout, and with an environment that make finds up to date.

    Args:
        folder: An empty one.
        tree: Where the product's files are taken from: a copy of the checkout, which has the native core beside them.
    """
    for path in ROOT.iterdir():
        if not path.name.startswith((".", "build", "tmp", "site")):
            (folder / path.name).symlink_to((tree if path.name in COPIED else ROOT) / path.name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(f"{sys.prefix}/bin")
    for stamp in (".builds", ".installed"):
        (folder / ".venv" / stamp).touch()


def steps_of(name: str) -> list[Step]:
    return steps((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RAN)
def test_the_commands_of_a_page_print_what_it_shows(name: str, printed_by: Callable[[str], Printed]) -> None:
    found = printed_by(name)
    assert found.exit_code == 0, f"{name}, line {found.failed_line}:\n{found.texts.get(found.failed_line)}"
    if platform.python_version() != python_of_the_pages():
        pytest.skip(f"the demo's text is the documentation of Python {python_of_the_pages()}")
    wrong = {
        f"{name}, line {step.line}": differs
        for step in steps_of(name)
        if step.shown is not None and not step.exempt
        if (differs := difference(step.shown, found.texts[step.line]))
    }
    assert not wrong, "\n".join(f"{place}\n{differs}" for place, differs in wrong.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", RAN)
def test_another_word_in_any_shown_line_is_noticed(name: str, printed_by: Callable[[str], Printed]) -> None:
    """What a page shows is compared line by line."""
    if platform.python_version() != python_of_the_pages():
        pytest.skip(f"the demo's text is the documentation of Python {python_of_the_pages()}")
    for step in steps_of(name):
        if step.shown is None or step.exempt:
            continue
        printed = printed_by(name).texts.get(step.line, "")
        lines = step.shown.splitlines()
        for number, line in enumerate(lines):
            if line.strip() == ANY_LINES or not re.search(r"[A-Za-z]{3}", " ".join(plain(line))):
                continue
            other = re.sub(r"[A-Za-z]{3,}", "another", line, count=1)
            edited = "\n".join([*lines[:number], other, *lines[number + 1 :]])
            if plain(other) != plain(line):
                assert difference(edited, printed), f"{name}, line {step.line}: {line}"


def python_of_the_pages() -> str:
    """Returns the version of Python whose documentation gave the figures of the pages."""
    return figure(read_records()["demo"], "python", "s")


@pytest.mark.parametrize("name", PAGES)
def test_few_blocks_are_exempt(name: str) -> None:
    assert [step.exempt for step in steps_of(name) if step.exempt] == EXEMPTIONS.get(name, [])


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_something(name: str) -> None:
    assert [step for step in steps_of(name) if step.kind in RUN and not step.exempt]


PAGE = """
Some words.

```yaml title="names.yaml"
first: one
```

1. A list:

    ```sh
    cat names.yaml
    echo "took 1.5 s"
    ```

    and what it prints:

    ```text
    first: one
    took 2.25 s
    ```

<!-- not run: nobody has a phone -->

```sh
adb pull it
```

```python
print("port 8080")
```

```text
...
```
"""


def wrong_in(page: str, folder: Path) -> str:
    """Returns the differences of a page's blocks; or, if a command fails, what it printed."""
    found = run(steps(page), folder)
    if found.exit_code:
        return f"line {found.failed_line}: {found.texts[found.failed_line]}"
    told = [step for step in steps(page) if step.shown is not None]
    return "".join(difference(step.shown or "", found.texts[step.line]) for step in told)


def test_a_page_is_run_from_top_to_bottom(tmp_path: Path) -> None:
    first, second, third, fourth = steps(PAGE)
    assert (first.title, first.text) == ("names.yaml", "first: one\n")
    assert (second.kind, second.line, second.shown) == ("sh", 10, "first: one\ntook 2.25 s\n")
    assert (third.exempt, fourth.kind, fourth.exempt) == ("nobody has a phone", "python", "")
    assert wrong_in(PAGE, tmp_path) == ""
    assert (tmp_path / "names.yaml").read_text() == "first: one\n"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("    first: one", "    first: two", "+first: one"),
        ("    took 2.25 s", "    took 2.25 s\n    and more", "-and more"),
        ("    first: one\n    took", "    took", "+first: one"),
        ("cat names.yaml", "cat name.yaml", "line 10: cat: name.yaml: No such file"),
        ("cat names.yaml", "false | cat names.yaml", "line 10: first: one"),
    ],
)
def test_a_page_that_is_not_true_is_noticed(before: str, after: str, said: str, tmp_path: Path) -> None:
    assert PAGE.count(before) >= 1
    assert said in wrong_in(PAGE.replace(before, after), tmp_path)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```\nls\n```\n", "line 1: a block of the kind ''"),
        ("Text\n\n    ls\n", "line 3: a block of the kind ''"),
        ("```text\nfirst\n```\n", "line 1: output without commands"),
        ("```sh\nls\n```\n\n```text\na\n```\n\n```text\nb\n```\n", "line 9: output without commands"),
    ],
)
def test_a_block_says_what_it_is(page: str, said: str) -> None:
    with pytest.raises(PageError, match=said):
        steps(page)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("took 3 s", "took 3.25 ms"),
        ("4.47 MB of 7,590,000", "649 kB of 1"),
        ("a   1\nbb  22", "a 333\nbb  4"),
        ("identity 16a3a8e231c5", "identity ffffffffffff0"),
        ("first\n...\nlast", "first\nsecond\nthird\nlast"),
        ("first\n...", "first"),
        ("...\nlast", "\nfirst\n\nlast\n"),
    ],
)
def test_figures_differ_from_run_to_run(shown: str, printed: str) -> None:
    assert difference(shown, printed) == ""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("took 3 s", "took 3 s more"),
        ("on pixel6", "on pixel7"),
        ("on pixel6, fp16", "on pixel6, fp32"),
        ("took 3 s", "took some s"),
        ("first\n...\nlast", "first\nsecond"),
        ("first\nlast", "first\nsecond\nlast"),
        ("first\nlast", "last\nfirst"),
        ("3 MB", "3 s"),
    ],
)
def test_words_do_not(shown: str, printed: str) -> None:
    assert difference(shown, printed)
