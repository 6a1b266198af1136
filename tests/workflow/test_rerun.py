"""What runs again: nothing after a finished build, and after a change exactly what hangs on it."""

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
        ({"order": "frequency"}, {"order", "layout", "package", "verify", "report"}),
        ({"cache": "lfu"}, ALLOCATED),
        ({"device": "oneplus12"}, ALLOCATED | {"device"}),
        ({"layers_per_job": 2}, {"predict", "order", "quantize", "layout", "package", "verify", "report"}),
    ],
)
def test_a_changed_setting_reruns_what_hangs_on_it(
    built: Workflow, change: dict[str, object], reruns: set[str]
) -> None:
    planned = set(built.planned(**change))
    assert planned <= reruns | {"preflight", "all"}
    assert planned >= {"package", "verify", "report"}


@pytest.mark.parametrize(
    ("file", "reruns"),
    [
        ("compiler/order/ripple.py", {"order", "layout", "package", "verify", "report"}),
        ("compiler/package/__init__.py", {"package", "verify", "report"}),
        ("compiler/report/__init__.py", {"report"}),
        ("compiler/quantize/rtn.py", {"quantize", "package", "verify", "report"}),
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


def test_a_deleted_artifact_is_made_again(built: Workflow) -> None:
    hidden = built.artifact.with_suffix(".away")
    built.artifact.rename(hidden)
    record = built.device / "package.json"
    saved = record.read_bytes()
    try:
        assert "package" in built.planned()
    finally:
        hidden.rename(built.artifact)
        record.write_bytes(saved)
