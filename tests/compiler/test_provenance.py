"""What made an artifact: the commit of the compiler's own checkout, and nothing of another repository."""

import json
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from coldpress.compiler import provenance as module
from coldpress.compiler.provenance import MARK, provenance
from tests.support.records import Build


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the file that marks the compiler's own."""
    folder = tmp_path / "checkout"
    (folder / MARK).parent.mkdir(parents=True)
    (folder / MARK).write_text("one\n")
    (folder / ".gitignore").write_text("site-packages\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "one")
    return folder


def test_the_mark_is_this_module() -> None:
    assert Path(module.__file__).resolve() == module.CHECKOUT / MARK


def test_the_commit_and_whether_files_differ_from_it(checkout: Path) -> None:
    found = provenance(checkout)
    assert (found.commit, found.dirty) == (git(checkout, "rev-parse", "HEAD"), False)
    assert found.compiler.endswith(git(checkout, "rev-parse", "HEAD")[:12])
    (checkout / "new").write_text("a build's own results are not the compiler\n")
    assert not provenance(checkout).dirty
    (checkout / MARK).write_text("two\n")
    changed = provenance(checkout)
    assert (changed.commit, changed.dirty) == (found.commit, True)
    assert changed.compiler.endswith("+")


def test_an_environment_inside_another_repository_is_no_checkout(checkout: Path) -> None:
    """site-packages inside a user's repository, and a folder in none."""
    installed = checkout / "site-packages"
    shutil.copytree(checkout / "compiler", installed / "compiler")
    assert provenance(installed).commit is None
    assert provenance(installed).compiler == provenance(installed).compiler_version


def test_a_folder_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / MARK).parent.mkdir(parents=True)
    (tmp_path / MARK).write_text("")
    assert provenance(tmp_path).commit is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance(module.CHECKOUT).commit is None


def test_a_hook_s_variables_name_no_other_repository(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(checkout / "nowhere"))
    found = provenance(checkout).commit
    monkeypatch.delenv("GIT_DIR")
    assert found == git(checkout, "rev-parse", "HEAD")


def test_versions_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNNING", ("snakemake", "no-such-package-anywhere"))
    found = provenance()
    assert found.libraries["snakemake"] == version("snakemake")
    assert found.libraries["torch"] == version("torch")
    assert "no-such-package-anywhere" not in found.libraries


def test_another_compiler_that_computes_the_same_gives_the_same_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record beside the artifact tells the two apart, and no byte of the artifact does."""
    build = Build(tmp_path)
    one = build.package()
    monkeypatch.setattr(module, "version", lambda name: "99.0")
    monkeypatch.setattr(module, "_git", lambda folder, *words: "0123456789" * 4)
    other = build.package()
    assert other.manifest_sha256 == one.manifest_sha256
    assert other.provenance != one.provenance
    assert other.provenance.libraries["torch"] == "99.0"
    texts = [path.read_bytes() for path in build.artifact.rglob("*") if path.is_file()]
    assert not [text for text in texts if b"0123456789012345" in text]
    assert json.loads(other.to_json())["provenance"]["dirty"] is True
