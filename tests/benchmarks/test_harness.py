"""The harness of the benchmarks: options of three sizes, kept rows, the check of keys, records, and what makes them
stale."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import command, documents, entries, inputs, journal, keys, stale
from benchmarks.harness.benchmark import Benchmark, Cell, Row, at_size, documented, option
from benchmarks.harness.compare import moved
from benchmarks.harness.kept import Kept, kept_rows
from benchmarks.harness.places import DOCUMENTS, ROOT, names
from benchmarks.harness.record import write
from benchmarks.harness.shown import committed, shown
from benchmarks.harness.tables import tables_of
from benchmarks.harness.timing import gain, interleaved, spread
from coldpress.schemas.errors import ColdpressError

TOY = '''"""Whether numbers square."""

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.benchmark import Benchmark, option
from benchmarks.harness.command import main


@dataclass(frozen=True)
class Options:
    """Numbers."""

    numbers: tuple[int, ...] = option((1, 2, 3, 4), smoke=(1,), help="numbers")
    pause_s: float = option(0.0, help="seconds of each")


class Plugin(Benchmark[Options]):
    """Squares."""

    keys = {"rows[].number": "number", "rows[].square": "its square", "sum": "of the squares"}
    full_minutes = 1

    def cells(self):
        for number in self.options.numbers:
            yield {"number": number}

    def measure(self, cell):
        (self.folder / str(cell["number"])).touch()
        with Path("measured").open("a") as file:
            file.write(f"{cell['number']}\\n")
        time.sleep(self.options.pause_s)
        yield {"square": cell["number"] ** 2}

    def figures(self, rows):
        return {"sum": sum(row["square"] for row in rows)}


if __name__ == "__main__":
    main("toy")
'''


@dataclass
class Toy:
    """A benchmark in a checkout that has nothing else."""

    folder: Path

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        told = {**os.environ, "PYTHONPATH": f"{self.folder}:{ROOT}"}
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.toy", *arguments],
            cwd=self.folder,
            env=told,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=300)
        return process.returncode, stdout, stderr

    @property
    def measured(self) -> list[str]:
        file = self.folder / "measured"
        return file.read_text().split() if file.exists() else []

    @property
    def scratch(self) -> list[str]:
        """What is left in the checkout beside kept rows."""
        return [path.name for path in (self.folder / "build/benchmarks").iterdir() if path.is_dir()]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """The harness is copied, so that its work folder is in the test's own."""
    harness = tmp_path / "benchmarks" / "harness"
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    harness.mkdir()
    for file in (ROOT / "benchmarks" / "harness").rglob("*.py"):
        target = harness / file.relative_to(ROOT / "benchmarks" / "harness")
        target.parent.mkdir(exist_ok=True)
        target.write_text(file.read_text())
    (tmp_path / "benchmarks" / "toy.py").write_text(TOY)
    return Toy(tmp_path)


def test_the_last_line_has_the_figures_and_the_rows(toy: Toy) -> None:
    code, stdout, _ = toy.run()
    assert code == 0
    squares = [{"number": number, "square": number**2} for number in (1, 2, 3, 4)]
    assert json.loads(stdout.splitlines()[-1]) == {"sum": 30, "rows": squares}
    assert toy.scratch == []


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(toy: Toy) -> None:
    process = toy.start("--pause-s", "0.5")
    while len(toy.measured) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "stopped: the rows of 1 of 4 cells are kept" in stderr
    assert toy.scratch == []
    code, stdout, stderr = toy.run("--pause-s", "0.5")
    assert code == 0
    assert "4 cells, 1 kept from an earlier start" in stderr
    assert json.loads(stdout.splitlines()[-1])["sum"] == 30
    assert toy.measured == ["1", "2", "2", "3", "4"]


def test_an_edit_makes_kept_rows_void(toy: Toy) -> None:
    before = kept_rows("toy", {"a": 1}, "code")
    assert before.path == kept_rows("toy", {"a": 1}, "code").path
    assert len({before.path, kept_rows("toy", {"a": 2}, "code").path, kept_rows("toy", {"a": 1}, "other").path}) == 3


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.kept.WORK", tmp_path)
    kept = kept_rows("toy", {}, "code")
    kept.add({"number": 1}, [{"square": 1}], 0.5)
    kept.add({"number": 2}, [{"square": 4}], 0.5)
    kept.path.write_text(kept.path.read_text()[:-9])
    assert list(kept_rows("toy", {}, "code").cells) == ['{"number": 1}']


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('"sum": "of', '"total": "of'), "error: benchmarks.toy: total is missing\n"),
        (('yield {"square"', 'yield {"cube"'), "error: benchmarks.toy: rows[].cube is not documented\n"),
        (('cell["number"] ** 2}', 'float("nan")}'), "error: benchmarks.toy: rows[].square is null or not finite\n"),
    ],
)
def test_figures_that_are_not_documented_fail(toy: Toy, change: tuple[str, str], sentence: str) -> None:
    file = toy.folder / "benchmarks" / "toy.py"
    file.write_text(file.read_text().replace(*change).replace('row["square"]', "1"))
    code, _, stderr = toy.run("--smoke")
    assert code == 1
    assert sentence in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('extra = "llama: no_such_package"', "needs no_such_package; pip install -e '.[llama]' in the checkout"),
        ('programs = ("no-such-program",)', "starts no-such-program, which is not on PATH; install it"),
    ],
)
def test_what_is_missing_is_one_sentence(toy: Toy, line: str, sentence: str) -> None:
    file = toy.folder / "benchmarks" / "toy.py"
    file.write_text(file.read_text().replace("full_minutes = 1", f"full_minutes = 1\n    {line}"))
    assert toy.run("--smoke") == (2, "", f"error: benchmarks.toy {sentence}\n")


@pytest.mark.slow
def test_a_record_names_all_that_a_reader_asks_for(toy: Toy) -> None:
    path = toy.folder / "record.json"
    assert toy.run("--smoke", "--record", str(path))[0] == 0
    found = json.loads(path.read_text())
    assert found["figures"] == {"sum": 1, "rows": [{"number": 1, "square": 1}]}
    assert found["command"] == "python -m benchmarks.toy --smoke"
    assert found["options"] == {"numbers": [1], "pause_s": 0.0}
    assert "benchmarks/toy.py" in found["inputs"]
    assert {"processor", "cores", "memory_bytes", "kernel"} <= set(found["machine"])
    assert {"python", "numpy", "torch"} <= set(found["versions"])
    assert set(found["load"]) == {"before", "after"}


def test_what_a_forked_process_loads_is_an_input(toy: Toy) -> None:
    """A pool ends its processes without their leave, so that none can tell at its end."""
    for name in ("module.py", "text.md"):
        (toy.folder / "benchmarks" / name).write_text("")
    in_pool = """import multiprocessing
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply(exec, ["import benchmarks.module; open('benchmarks/text.md').read()"])"""
    file = toy.folder / "benchmarks" / "toy.py"
    file.write_text(file.read_text().replace("time.sleep(self.options.pause_s)", in_pool))
    path = toy.folder / "record.json"
    code, _, stderr = toy.run("--smoke", "--record", str(path))
    assert code == 0, stderr
    assert {"benchmarks/module.py", "benchmarks/text.md"} <= set(json.loads(path.read_text())["inputs"])


@dataclass(frozen=True)
class Options:
    count: int = option(10, smoke=1, full=100, help="count")
    name: str = option("a", help="name")


def test_options_of_three_sizes() -> None:
    assert [at_size(Options, size).count for size in ("smoke", "default", "full")] == [1, 10, 100]
    assert at_size(Options, "full", count=7) == Options(7, "a")


class Once(Benchmark[Options]):
    keys = {}  # noqa: RUF012
    full_minutes = 1

    def cells(self) -> Iterator[Cell]:
        yield {}

    def measure(self, cell: Cell) -> Iterator[Row]:
        yield {}


def test_what_is_made_once_is_made_anew_for_another_key(tmp_path: Path) -> None:
    made: list[str] = []
    benchmark = Once(Options(), tmp_path)
    for key in ("a", "a", "b", "a"):
        assert benchmark.once(key, lambda key=key: made.append(key) or key) == key
    assert made == ["a", "b", "a"]


class Parts(Once):
    over = ({"part": ("a",), "number": "count"}, {"part": ("b", "c"), "text": "name"})
    cells = Benchmark.cells


def test_cells_are_each_combination_of_values_part_by_part(tmp_path: Path) -> None:
    """A tuple has the values, an option its value, or as many numbers as it counts."""
    cells = list(Parts(Options(count=2), tmp_path).cells())
    numbers = [{"part": "a", "number": 0}, {"part": "a", "number": 1}]
    assert cells == [*numbers, {"part": "b", "text": "a"}, {"part": "c", "text": "a"}]


def test_what_cells_have_of_options_is_documented_by_these() -> None:
    assert documented(Parts) == {"rows[].number?": "count", "rows[].text?": "name"}


def test_tables_show_parts_lists_and_figures() -> None:
    rows = [{"part": "a", "x": 1, "steps": [{"s": 2}]}, {"part": "b", "y": spread([1.0]), "x": None, "ids": [1]}]
    figures = {"rows": rows, "gain": 1.5, "by": {"one": {"worst": 1}}, "of": {"z": 3}}
    found = {
        table.title: (list(table.columns), [list(row) for row in table.rows]) for table in tables_of("t", rows, figures)
    }
    assert found == {
        "a": (["part", "x"], [["a", 1]]),
        "b": (["part", "y"], [["b", spread([1.0])]]),
        "steps, a": (["s"], [[2]]),
        "by": (["by", "worst"], [["one", 1]]),
        "figures": (["figure", "value"], [["gain", 1.5], ["of.z", 3]]),
    }


def test_a_gain_within_its_spread_is_none() -> None:
    assert gain([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])["shown"] == "3.00"
    assert gain([0.9, 1.1, 1.2], [1.0, 1.0, 1.0])["shown"] == "none"
    assert gain([1.0, 2.0], [2.0, 4.0])["shown"] == "0.50"


def test_a_spread_leaves_out_the_outermost_tenths() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert spread([float(number) for number in range(20)]) == {"median": 9.5, "low": 2.0, "high": 17.0}


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    ticks = iter(range(100))
    found = interleaved(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, clock=lambda: float(next(ticks))
    )
    assert order == ["a", "b"] * 3
    assert {name: len(samples) for name, samples in found.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("documented", "figures", "said"),
    [
        (["rows[].x", "y"], {"rows": [{"x": 1}], "y": 2}, []),
        (["rows[].x?"], {"rows": [{"x": None}, {}]}, []),
        (["rows[].x"], {"rows": [{"x": 1}, {"x": None}]}, ["rows[].x is null or not finite"]),
        (["*.x"], {"a": {"x": 1}, "b": {"x": 2}}, []),
        (["x"], {"x": spread([1.0, 2.0])}, []),
        (["x"], {"x": [1.0, float("inf")]}, ["x is null or not finite"]),
        (["x"], {}, ["x is missing"]),
        (["x"], {"x": 1, "y": 1}, ["y is not documented"]),
    ],
)
def test_keys(documented: list[str], figures: dict[str, Any], said: list[str]) -> None:
    assert keys.complaints(dict.fromkeys(documented, ""), figures) == said


def test_comments_docstrings_and_help_are_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "ROOT", tmp_path)
    (tmp_path / "runtime/native").mkdir(parents=True)
    file, core = tmp_path / "a.py", tmp_path / "runtime/native/a.cpp"

    def digests() -> tuple[str | None, str | None]:
        inputs.digest_of.cache_clear()
        return inputs.digest_of("a.py"), inputs.digest_of("runtime/native")

    file.write_text('"""Text."""\nx: int = f(1, help="one")\n"""More text."""\n')
    core.write_text('int x = 1; // one\nconst char *s = "// kept";\n')
    before = digests()
    file.write_text('"""Other text."""\n\nx: int = f(1, help="other")  # one\n')
    core.write_text('/* more */ int x = 1;\nconst char *s = "// kept";\n')
    assert digests() == before
    file.write_text("x: int = f(2, help='other')\n")
    core.write_text('int x = 1;\nconst char *s = "// other";\n')
    assert not {*digests()} & {*before}


def test_a_record_is_stale_when_what_it_loaded_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edit of a selector makes the figures stale whose run loaded it, and no others."""
    monkeypatch.setattr(inputs, "ROOT", tmp_path)
    monkeypatch.setattr(stale, "WORK", tmp_path / "work")
    monkeypatch.setattr(stale, "record_of", lambda name, size="default": tmp_path / f"{name}.json")
    for name in ("topk.py", "relu.py"):
        (tmp_path / name).write_text("x = 1\n")
    inputs.digest_of.cache_clear()
    for name, loaded in (("one", "topk.py"), ("other", "relu.py")):
        told = {"inputs": inputs.digests([loaded])}
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
        assert stale.inputs_file(name).stat().st_mtime < (tmp_path / f"{name}.json").stat().st_mtime
    (tmp_path / "topk.py").write_text("x = 2\n")
    inputs.digest_of.cache_clear()
    assert {name: stale.reasons(name) for name in ("one", "other", "none")} == {
        "one": ["topk.py"],
        "other": [],
        "none": ["no record"],
    }
    assert stale.inputs_file("one").stat().st_mtime >= (tmp_path / "one.json").stat().st_mtime
    assert stale.inputs_file("other").stat().st_mtime < (tmp_path / "other.json").stat().st_mtime


def test_figures_that_moved() -> None:
    def record(*rows: dict[str, Any]) -> dict[str, Any]:
        return {"figures": {"rows": list(rows)}}

    old = record({"model": "a", "ppl": 2.0, "s": spread([1.0, 2.0])}, {"model": "b", "ppl": 3.0, "s": spread([1.0])})
    new = record({"model": "b", "ppl": 3.0, "s": spread([1.5])}, {"model": "a", "ppl": 2.1, "s": spread([1.9, 3.0])})
    assert moved(old, new) == [
        ("rows[model=a].ppl", 2.0, 2.1),
        ("rows[model=b].s", spread([1.0]), spread([1.5])),
    ]


def test_documents_show_the_figures_of_records() -> None:
    records = {"toy": {"figures": {"rows": [{"model": "a", "ppl": 2.344}], "gain": spread([1.0, 1.5, 1.6])}}}
    text = "It is 2.34<!-- toy: rows[model=a].ppl, .2f --> and 1.5<!-- toy: gain, .1f -->."
    assert documents.checked(text, records) == (text, [])
    fixed, said = documents.checked(text.replace("2.34", "2.40"), records)
    assert fixed == text
    assert said == ["toy: rows[model=a].ppl is 2.34, shown is 2.40"]
    text = "It ends with\n\n<!-- toy: screen -->\n```\na\n\nb\n```\n"
    screen = {"toy": {"figures": {"screen": "a\n\nb"}}}
    assert documents.checked(text, screen) == (text, [])
    assert documents.checked(text.replace("\nb", "\nc"), screen) == (text, ["toy: screen is b, shown is c"])
    lost, said = documents.checked("9<!-- toy: gone, .1f -->", records)
    assert lost == "9<!-- toy: gone, .1f -->"
    assert said == ["toy: gone is in no record; shown is '9'"]


def test_documents_show_rows_of_records_as_tables() -> None:
    rows = [
        {"cell": "load", "paper": "one", "ours": 1.234, "within": True, "note": None},
        {"cell": "use", "paper": "one", "ours": {"median": 2.0, "low": 1.0, "high": 3.0}, "within": False},
        {"cell": "load", "paper": "two", "ours": 9.0, "within": True},
    ]
    records = {"toy": {"figures": {"rows": rows}}}
    asked = "<!-- table of toy, paper=one: cell, ours .1f, within, note -->\n\n"
    table = (
        "| cell | ours | within | note |\n| --- | --- | --- | --- |\n| load | 1.2 | yes |  |\n| use | 2.0 | no |  |\n"
    )
    assert documents.checked(f"{asked}{table}\nText\n", records) == (f"{asked}{table}\nText\n", [])
    fixed, said = documents.checked(f"{asked}{table.replace('2.0', '2.1')}", records)
    assert fixed == asked + table
    assert len(said) == 1
    for gone in (asked.replace("paper=one", "paper=three"), asked.replace("ours", "theirs"), asked.replace("toy", "t")):
        kept, said = documents.checked(gone + table, records)
        assert kept == gone + table
        assert "is in no record" in said[0]


def test_a_committed_record_has_the_rows_of_documents() -> None:
    """Of a long list; rows with the texts of one that is shown stay, too, since their numbers name them."""
    rows = [{"model": model, "ppl": number} for number in range(100) for model in ("a", "b", "c", "d")]
    rows.append({"model": "e", "ppl": 700})
    record = {"figures": {"sum": 3, "rows": rows, "few": rows[:2]}}
    texts = ["1<!-- toy: rows[model=b#2].ppl, d -->", "<!-- table of toy, ppl=700: model, ppl -->\n\n| model | ppl |\n"]
    kept = committed(record, shown(texts)["toy"])
    assert kept["figures"]["rows"] == [row for row in rows if row["model"] in ("b", "e")]
    assert (kept["figures"]["sum"], kept["figures"]["few"]) == (3, rows[:2])
    assert kept["left_out"] == {"rows": 300}
    assert documents.checked(texts[0], {"toy": kept}) == (texts[0], [])
    assert committed(record, None)["figures"]["rows"] == []
    few = [f"few[model={model}].{name}" for model in "ab" for name in ("model", "ppl")]
    assert [name for name, *_ in moved(kept, {"figures": {"sum": 4, "rows": rows}})] == ["sum", *few]


def test_a_record_is_written_as_it_is(tmp_path: Path) -> None:
    told = {"inputs": {"a/b.py": "1", "a/c.py": "2", "d": "3"}, "versions": {"numpy": "2"}, "figures": {"rows": [{}]}}
    write(tmp_path / "record.json", told)
    text = (tmp_path / "record.json").read_text()
    assert json.loads(text) == told
    assert '\n  "a/b.py": "1", "a/c.py": "2",\n' in text


def test_the_committed_records_have_no_other_rows() -> None:
    asked = shown(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    for name, record in documents.read_records().items():
        assert committed(record, asked.get(name))["figures"] == record["figures"], name


def test_the_documents_are_made_from_the_records(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["documents"])
    assert documents.main() == 0, capsys.readouterr().out


PAGE = """# Cache

## 2026-11-24 · new?

**Rejected** — it loses,
everywhere.

`python -m benchmarks.cache_policies --slots 0.3 --full`, compared by `python -m benchmarks.harness.compare A B`

## 2026-11-23 · old? · 0123abc { #cache-07 }

**Accepted** — it wins.

No command gives it again.
"""
INDEX = """# Experiments

<!-- made from the pages -->

| disposition | means | entries, 2 in all |
|---|---|---|
| accepted | what was tried is in the product today, or the figures support what the product does | 1 |
| conditional | it pays only where a condition holds; the answer says where | 0 |
| rejected | it was tried and not taken | 1 |
| reversed | it was taken once and later undone | 0 |

## [Cache](cache.md)

| id | date | question | disposition | answer |
|---|---|---|---|---|
| [cache-08](cache.md#cache-08) | 2026-11-24 | new? | rejected | it loses, everywhere. |
| [cache-07](cache.md#cache-07) | 2026-11-23 | old? | accepted | it wins. |

<!-- end of what is made -->

The end.
"""


def test_an_entry_names_its_answer_its_command_and_its_commit() -> None:
    """The newest entries may wait for their commit; a benchmark's flag must be one that it has."""
    whole = journal.fixed("cache", PAGE, {})
    assert list(journal.complaints({"cache": whole})) == []
    bad = (
        whole.replace("--slots", "--gone").replace("No command", "Nothing").replace("**Rejected**", "**Lost**")
        + "\n## 2026-11-25 · newer? { #cache-07 }\n\n**Accepted** — yes\n\n`python -m benchmarks.x`\n"
        + "\n## 2026-11-22 · older? · 0123abc { #order-01 }\n\nNo command.\n\n## Undated\n"
    )
    shown = "**Accepted** — answer., **Conditional** — answer., **Rejected** — answer., **Reversed** — answer."
    assert list(journal.complaints({"cache": bad})) == [
        "cache.md: '## Undated' is no heading of an entry",
        f"2026-11-24 · new?: no disposition and answer; begin it with one of {shown}",
        "2026-11-24 · new?: benchmarks.cache_policies has no option gone",
        "2026-11-23 · old?: no command; name it, or say `No command` and why",
        "2026-11-25 · newer?: its answer must end with a full stop, and an empty line must follow",
        "2026-11-25 · newer?: there is no benchmarks.x",
        "2026-11-22 · older?: its id is order-01, and must be cache-NN on this page",
        f"2026-11-22 · older?: no disposition and answer; begin it with one of {shown}",
        "2026-11-25 · newer?: it is newer than the entry above it, of 2026-11-23",
        "2026-11-25 · newer?: no commit; --fix adds it",
        "cache-07: 2 entries have this id",
    ]


def test_fix_adds_commits_and_the_next_ids() -> None:
    """The older of two new entries gets the smaller id; what is there stays."""
    newest = PAGE.replace("# Cache\n", "# Cache\n\n## 2026-11-24 · newest?\n")
    assert list(journal.complaints({"cache": PAGE})) == ["2026-11-24 · new?: no id; --fix adds it"]
    assert journal.fixed("cache", newest, {"2026-11-24 · new?": "4567def", "2026-11-23 · old?": "89abcde"}) == (
        newest.replace("newest?\n", "newest? { #cache-09 }\n").replace("new?\n", "new? · 4567def { #cache-08 }\n")
    )
    assert journal.fixed("order", "## 2026-11-24 · new?\n", {}) == "## 2026-11-24 · new? { #order-01 }\n"


def test_fix_writes_the_index_and_a_stale_one_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "cache.md").write_text(PAGE)
    index = tmp_path / "index.md"
    index.write_text("# Experiments\n\n<!-- made from the pages -->\n<!-- end of what is made -->\n\nThe end.\n")
    journal.fix(tmp_path, {})
    assert index.read_text() == INDEX
    assert journal.all_complaints(tmp_path) == []
    (tmp_path / "cache.md").write_text((tmp_path / "cache.md").read_text().replace("it wins", "it won"))
    assert journal.all_complaints(tmp_path) == ["index.md is not up to date; --fix writes it"]
    with pytest.raises(ColdpressError, match=r"needs a line .*end of what is made"):
        journal.with_index("# Experiments\n", {})


def test_the_journal_is_whole() -> None:
    """Each entry of docs/experiments/ has what it needs, the index is made from them, and the site shows all pages."""
    assert journal.all_complaints() == []
    shown = re.findall(r"experiments/([\w-]+)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted({"index", *entries.read_pages()})


def test_rows_are_kept_as_soon_as_they_are_there(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "rows.jsonl")
    kept.add({"number": 1}, [{"square": 1}], 0.25)
    assert json.loads(kept.path.read_text())["rows"] == [{"square": 1}]
    kept.drop()
    assert not kept.path.exists()


def test_the_command_names_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main("prefill", ["--help"])
    shown = capsys.readouterr().out
    assert "--smoke" in shown
    assert "all cases, about 1 minutes" in shown
    assert "rows[].share_of_sgemm" in shown


def test_the_help_shows_a_default_with_a_percent_sign(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main("plan_search", ["--help"])
    assert "50%)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_workflow_measures_what_has_no_record_and_timings_alone() -> None:
    """Each benchmark of the harness has a rule's job; the dry run writes no record."""
    for name in names():
        stale.inputs_file(name).unlink()
    told = [sys.executable, "-m", "snakemake", "-s", "benchmarks/Snakefile", "-n", "--cores", "2", "--forceall"]
    told += ["--", *(f"benchmarks/results/{name}.json" for name in names())]  # whose inputs' files are not there yet
    done = subprocess.run(told, cwd=ROOT, capture_output=True, text=True, timeout=300)
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown[-3000:]
    jobs = {job.split("\n")[0]: job for job in shown.split("output: benchmarks/results/")[1:]}
    assert {name.split(".json")[0] for name in jobs} == set(names())
    assert "threads: 2" in next(job for name, job in jobs.items() if name.startswith("prefill.json"))
    assert "threads: 2" not in next(job for name, job in jobs.items() if name.startswith("place.json"))
