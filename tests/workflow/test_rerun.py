"""What runs again: nothing after a finished build, and after a change exactly what hangs on it."""

import shutil
from pathlib import Path

import pytest

from tests.workflow.conftest import Workflow

ALLOCATED = {
    "allocate",
    "recalibrate",
    "predict",
    "place",
    "order",
    "quantize",
    "layout",
    "package",
    "verify",
    "publish",
    "report",
}


def test_a_second_run_does_nothing(built: Workflow) -> None:
    assert built.planned() == {}
    done = built.run()
    assert done.returncode == 0
    assert "Nothing to be done" in done.stdout + done.stderr


def test_a_changed_format_reruns_what_hangs_on_it(built: Workflow) -> None:
    """The budget is divided anew, so everything from `allocate` on; no stage that reads the model or the corpus."""
    assert set(built.planned(format="fp16")) == ALLOCATED | {"preflight", "all"}


@pytest.mark.parametrize(
    ("change", "reruns"),
    [
        ({"order": "frequency"}, {"order", "layout", "package", "verify", "publish", "report"}),
        ({"cache": "lfu"}, ALLOCATED),
        ({"device": "oneplus12"}, ALLOCATED | {"device"}),
        ({"max_ppl_ratio": 1.5}, {"publish", "report"}),
        ({"layers_per_job": 2}, {"predict", "order", "quantize", "layout", "package", "verify", "publish", "report"}),
    ],
)
def test_a_changed_setting_reruns_what_hangs_on_it(
    built: Workflow, change: dict[str, object], reruns: set[str]
) -> None:
    planned = set(built.planned(**change))
    assert planned <= reruns | {"preflight", "all"}
    assert planned >= reruns & {"package", "verify", "publish", "report"}


@pytest.mark.parametrize(
    ("file", "reruns"),
    [
        ("compiler/order/ripple.py", {"order", "layout", "package", "verify", "publish", "report"}),
        ("compiler/package/__init__.py", {"package", "verify", "publish", "report"}),
        ("compiler/report/__init__.py", {"report"}),
        ("compiler/quantize/rtn.py", {"quantize", "package", "verify", "publish", "report"}),
    ],
)
def test_an_edited_stage_reruns_with_what_follows(built: Workflow, edited: Path, file: str, reruns: set[str]) -> None:
    path = edited / file
    path.write_text(path.read_text() + "\n# edited\n")
    assert set(built.planned()) == reruns | {"all"}


def test_a_touched_file_reruns_nothing(built: Workflow, edited: Path) -> None:
    (edited / "compiler/order/ripple.py").touch()
    (edited / "profiles/devices/pixel6.yaml").touch()
    assert built.planned() == {}


def test_a_deleted_artifact_is_made_again(built: Workflow, tmp_path: Path) -> None:
    """The same one, and after that there is nothing to do; a dry run finds out without changing a file."""
    copy = built.at(tmp_path)  # as deep as the build, whose records hold relative paths
    shutil.copytree(built.folder, copy.folder, dirs_exist_ok=True)
    shutil.rmtree(copy.artifact)
    before = files(copy.folder)
    assert set(copy.planned()) == {"package", "verify", "publish", "report", "all"}
    assert files(copy.folder) == before
    copy.build()
    assert files(copy.artifact) == files(built.artifact)
    assert copy.planned() == {}


def files(folder: Path) -> dict[str, bytes]:
    """Content of every file, snakemake's own apart."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".snakemake" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_labelled_builds_stand_side_by_side(built: Workflow, tmp_path: Path) -> None:
    """What does not depend on the device is shared, the rest has a folder of its own."""
    assert set(built.planned(label="small")) == ALLOCATED | {"device", "preflight", "all"}
    done = built.run("--dry-run", label="small")
    assert "build/tiny/pixel6+small/publish.json" in done.stdout + done.stderr
    assert built.planned() == {}
