"""Branches of the hub: the first build asks, later ones read the lock file, and `locked` refuses what is in neither."""

from pathlib import Path

import pytest

from coldpress.compiler.workflow import pins
from coldpress.compiler.workflow.pins import LOCK_FILE, Pins, keep, read_lock
from coldpress.schemas.errors import ColdpressError

FIRST, SECOND = "1" * 40, "2" * 40
NAME = "model owner/name@main"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The branches that the hub was asked for; it answers with another commit each time."""
    found: list[str] = []

    def commit_of(hub_id: str, revision: str, kind: str) -> str:
        found.append(f"{kind} {hub_id}@{revision}")
        return str(len(found)) * 40

    monkeypatch.setattr(pins, "commit_of", commit_of)
    return found


def commit(folder: Path, revision: str | None = None, locked: bool = False, ask: bool = True) -> str:
    """The commit of one build, which keeps it."""
    build = Pins(folder, locked, ask)
    found = build.commit("model", "owner/name", revision, "revision")
    keep(folder, build.used)
    return found


def test_the_first_build_asks_and_later_ones_know(tmp_path: Path, asked: list[str]) -> None:
    assert [commit(tmp_path), commit(tmp_path, "main"), commit(tmp_path, locked=True)] == [FIRST] * 3
    assert commit(tmp_path, "other") == SECOND
    assert asked == [NAME, "model owner/name@other"]
    assert read_lock(tmp_path) == {NAME: FIRST, "model owner/name@other": SECOND}
    (tmp_path / LOCK_FILE).unlink()
    assert commit(tmp_path) == "3" * 40, "what the branch is by then"


def test_each_new_commit_is_said_once(tmp_path: Path, asked: list[str]) -> None:
    build = Pins(tmp_path, locked=False, ask=True)
    build.commit("model", "owner/name", None, "revision")
    assert not (tmp_path / LOCK_FILE).exists(), "a dry run writes nothing"
    assert keep(tmp_path, build.used) == [f"{NAME} is commit {FIRST}, kept in {tmp_path / LOCK_FILE}"]
    assert keep(tmp_path, build.used) == []


def test_locked_refuses_what_is_not_pinned(tmp_path: Path, asked: list[str]) -> None:
    with pytest.raises(ColdpressError) as caught:
        commit(tmp_path, locked=True)
    assert str(caught.value) == (
        f"locked=true, and no commit is pinned for main of the model owner/name: {tmp_path / LOCK_FILE} does not have "
        "it; give revision=<40 hexadecimal digits>, or build once without locked"
    )
    assert commit(tmp_path, FIRST, locked=True) == FIRST
    assert asked == []


def test_a_job_asks_nothing(tmp_path: Path, asked: list[str]) -> None:
    """A job on a cluster reads the settings again, perhaps without a network."""
    assert commit(tmp_path, ask=False) == "main"
    commit(tmp_path)
    assert commit(tmp_path, ask=False) == FIRST
    assert asked == [NAME]


@pytest.mark.parametrize("text", ["", "{}", '{"commits": {"a": 1}}', '{"commits": {}, "other": 1}'])
def test_a_damaged_lock_file(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    with pytest.raises(ColdpressError, match=r"sources\.lock cannot be read as a lock file; restore it, or delete it"):
        read_lock(tmp_path)
