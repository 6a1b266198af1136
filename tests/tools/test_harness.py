"""The fuzzer sees what it looks for: each class, the guilty edit, the same mutants for the same seed."""

import contextlib
import os
import random
import shutil
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from coldpress.schemas.manifest import EXPERTS_FILE
from tests.support.artifacts import build_artifact
from tools.fuzz import artifacts, checkpoints, file_edits, limited
from tools.fuzz.artifacts import CURVE, EDITS, RECIPES, add_files
from tools.fuzz.campaign import Mutant, Run, draw, remove, smallest, try_out
from tools.fuzz.json_edits import Unfit
from tools.fuzz.limited import Ended, run_limited

pytestmark = pytest.mark.slow


def say(words, code=2, out=""):
    def function():
        sys.stderr.write(words)
        sys.stdout.write(out)
        return code

    return function


def fail():
    raise KeyError("x")


def busy():
    while True:
        pass


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (say("", 0, "all\twell\n"), "fine"),
        (say("error: a.json: no JSON; copy it again\n"), "refused"),
        (say("error: one\nerror: two\n"), "untidy"),
        (say("a notice\nerror: one\n"), "untidy"),
        (say("error: \n"), "untidy"),
        (say(""), "untidy"),
        (say("error: \x1b[2J\n"), "untidy"),
        (say("error: " + "x" * 2000 + "\n"), "untidy"),
        (say("", 0, "\x1b[2J"), "untidy"),
        (say("x.py:1: RuntimeWarning: overflow\n", 0), "untidy"),
        (say("", 1), "traceback"),
        (say("error: x\n", 3), "traceback"),
        (fail, "traceback"),
        (os.abort, "crash"),
        (lambda: bytearray(3_000_000_000) and 0, "over_2_gb"),  # refused by the system, and not said in a sentence
        (lambda: len(b"x" * 200_000_000) and 0, "fine"),
    ],
)
def test_an_end_has_its_class(tmp_path, function, kind):
    assert run_limited(function, tmp_path).kind == kind


def test_memory_that_was_used_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(limited, "MEMORY_BYTES", 100_000_000)
    assert run_limited(lambda: len(b"x" * 200_000_000) and 0, tmp_path).kind == "over_2_gb"


def test_notices_may_come_before_the_sentence_where_that_is_said(tmp_path):
    assert run_limited(say("a notice\nerror: one\n"), tmp_path, logs=True).kind == "refused"
    assert run_limited(say("error: one\na notice\n"), tmp_path, logs=True).kind == "untidy"


@pytest.mark.parametrize(("name", "limit", "function"), [("WALL_S", 0.3, lambda: time.sleep(60)), ("CPU_S", 1, busy)])
def test_endless_work_is_ended(tmp_path, monkeypatch, name, limit, function):
    monkeypatch.setattr(limited, name, limit)
    assert run_limited(function, tmp_path).kind == "hang"


def test_whatever_a_command_has_started_ends_with_it(tmp_path):
    def leave_a_child():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        (tmp_path / "child").write_text(str(child))
        return 0

    assert run_limited(leave_a_child, tmp_path).kind == "fine"
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        state = "gone"
        with contextlib.suppress(OSError), open(f"/proc/{child}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        if state in ("gone", "Z"):
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} still runs")


ALL_EDITS = {**EDITS, **checkpoints.EDITS}
PLANTED = {name: (lambda folder, chance, name=name: (folder / name).write_text("x") and name, 1) for name in "abcd"}


class Planted:
    """A program that fails where a folder holds both `a` and `b`."""

    EDITS = PLANTED
    MENDINGS = ("none",)
    bases = ("base",)

    def copy(self, base, folder):
        folder.mkdir()

    def mend(self, folder, mending):
        pass

    def runs(self, mutant, folder, scratch):
        failed = {"a", "b"} <= {path.name for path in folder.iterdir()}
        yield Run("run", Ended("traceback" if failed else "fine", "", ""))


def test_the_smallest_list_of_edits_has_only_the_guilty_ones():
    target = Planted()
    outcome = try_out(target, Mutant(0, "base", tuple((name, 0) for name in "cabd"), "none"))
    (failure,) = outcome.runs
    assert failure.failed
    assert smallest(target, outcome, failure).done == ("a", "b")


def contents(folder):
    """Everything in a folder, by kind and content."""
    found = {}
    for parent, folders, names in os.walk(folder):
        for name in folders + names:
            path = os.path.join(parent, name)
            status = os.lstat(path)
            data = Path(path).read_bytes() if stat.S_ISREG(status.st_mode) else b""
            found[os.path.relpath(path, folder)] = (status.st_mode, status.st_nlink if data else 0, data)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    recipe = RECIPES["predictor"]
    untied = recipe.spec.model_copy(update={"tie_word_embeddings": False})
    recipe = replace(recipe, spec=untied, rows_on_flash=True)  # all that edits change
    path = build_artifact(tmp_path_factory.mktemp("base") / "a", recipe).path
    (path / EXPERTS_FILE).write_text(CURVE.to_json())
    return add_files(path, recipe.spec.vocab_size)


@pytest.fixture
def scratch(tmp_path):
    """A folder that goes at once: pytest, which removes its own much later, fails at folders that nest this deep."""
    yield tmp_path
    remove(tmp_path)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_changes_something_and_the_same_for_the_same_seed(base, scratch, name):
    before, changed = contents(base), 0
    for seed in range(5):
        seen = []
        for attempt in range(2):
            folder = scratch / f"{seed}-{attempt}" / "mutant"
            shutil.copytree(base, folder)
            with contextlib.suppress(Unfit):
                EDITS[name][0](folder, random.Random(seed))
            seen.append(contents(folder))
        assert seen[0] == seen[1]
        changed += seen[0] != before
    assert changed


@pytest.mark.parametrize("name", sorted(ALL_EDITS))
def test_no_edit_touches_what_lies_outside(base, scratch, monkeypatch, name):
    """Whoever runs this as root has a system to lose: unsafe names stay names, links stay unread, pipes unopened."""
    outside = scratch / "outside"
    shutil.copytree(base, outside)
    monkeypatch.setattr(artifacts, "NAMES", (str(outside / "LICENSE"), "../outside/LICENSE"))
    before = contents(outside)
    for seed in range(12):
        folder = scratch / str(seed) / "mutant"
        shutil.copytree(base, folder)
        for number, path in enumerate(file_edits.files(folder)):
            if (number + seed) % 3 == 0:
                path.unlink()
                path.symlink_to(outside / path.relative_to(folder))
            elif (number + seed) % 3 == 1 and seed > 8:
                path.unlink()
                os.mkfifo(path)
        with contextlib.suppress(Unfit):
            ALL_EDITS[name][0](folder, random.Random(seed))
        artifacts.Artifacts.mend(None, folder, "all")
    assert contents(outside) == before


def test_a_number_and_a_seed_say_which_mutant():
    target = Planted()
    assert draw(target, 1, 7) == draw(target, 1, 7)
    assert len({draw(target, seed, number).edits for seed in (1, 2) for number in range(20)}) == 40
