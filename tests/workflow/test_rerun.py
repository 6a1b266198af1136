"""What runs again: nothing after a finished build, and after a change exactly what hangs on it."""

import shutil
from pathlib import Path

import pytest

from tests.support.stages import between
from tests.support.workflow import Workflow

ALLOCATED = {*between("allocate", "report")}
PACKAGED = {*between("package", "report")}
ORDERED = {"order", "plan"} | PACKAGED
LIKE = (
    "runtime/sparsity/topk.py",
    "runtime/quantization/int8_group32.py",
    "compiler/stages/order/frequency.py",
    "compiler/architectures/llama.py",
)


@pytest.mark.slow
def test_a_second_run_does_nothing(built: Workflow) -> None:
    assert built.planned() == {}
    done = built.run()
    assert done.returncode == 0
    assert "Nothing to be done" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reruns"),
    [
        # the budget is divided anew, so everything from `allocate` on; no stage that reads the model or the corpus
        ({"format": "fp16"}, ALLOCATED | {"preflight"}),
        ({"cache": "lru"}, ALLOCATED | {"preflight"}),
        # calibration has looked at what every method needs
        ({"method": "relu"}, (ALLOCATED | {"preflight"}) - {"predict", "size"}),
        ({"device": "oneplus12"}, ALLOCATED | {"preflight", "device"}),
        ({"predictor_tolerance": 0.01}, {"size", "plan", "preflight"} | PACKAGED),
        ({"pinned_share": 0.5}, {"place", "preflight"} | ORDERED),
        ({"preload": "auto"}, {"plan", "preflight"} | PACKAGED),
        ({"order": "frequency"}, {"preflight"} | ORDERED),
        ({"search_tokens": 64}, {"preflight"} | ORDERED),
        ({"test_tokens": 16}, {"verify", "publish", "report", "preflight"}),
        ({"max_ppl_ratio": 1.5}, {"publish", "report", "preflight"}),
        ({"layers_per_job": 2}, {"predict", "size", "quantize"} | ORDERED),
        ({"preflight": "off"}, {"preflight"}),
        ({"learning_rate": 0.5}, {"preflight"}),  # nothing is distilled
    ],
)
def test_a_changed_setting_reruns_exactly_what_hangs_on_it(
    built: Workflow, change: dict[str, object], reruns: set[str]
) -> None:
    """`preflight` has tried the settings as they were; no other stage reads its record."""
    assert set(built.planned(**change)) == reruns | {"all"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "reruns"),
    [
        ("compiler/stages/order/ripple.py", {"preflight"} | ORDERED),
        ("compiler/stages/package/__init__.py", PACKAGED | {"preflight"}),
        ("compiler/stages/report/__init__.py", {"report", "preflight"}),
        ("compiler/rounding/rtn.py", ALLOCATED | {"preflight"}),
        ("runtime/native/src/attention.cpp", {"ingest", "tokenize", "calibrate", "preflight"} | ALLOCATED),
    ],
)
def test_an_edit_reruns_what_it_can_change_with_what_follows(
    built: Workflow, edited: Path, file: str, reruns: set[str]
) -> None:
    path = edited / file
    path.write_text(path.read_text() + ("\n# edited\n" if path.suffix == ".py" else "\n// edited\n"))
    assert set(built.planned()) == reruns | {"all"}


@pytest.mark.slow
def test_plugins_that_are_not_chosen_and_touched_files_rerun_nothing(built: Workflow, edited: Path) -> None:
    """Copies of plug-ins under other names; tests/contracts/test_one_file.py has some that are no copies."""
    for like in LIKE:
        path = edited / like
        path.with_name("newest.py").write_text(path.read_text() + "\n# another\n")
    (edited / "compiler/stages/order/ripple.py").touch()
    (edited / "profiles/devices/pixel6.yaml").touch()
    assert built.planned() == {}


@pytest.mark.slow
def test_a_deleted_artifact_is_made_again(built: Workflow, tmp_path: Path) -> None:
    """The same one, and after that there is nothing to do; a dry run finds out without changing a file."""
    copy = built.at(tmp_path)  # as deep as the build, whose records hold relative paths
    shutil.copytree(built.folder, copy.folder, dirs_exist_ok=True, symlinks=True)
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


@pytest.mark.slow
def test_labelled_builds_stand_side_by_side(built: Workflow, tmp_path: Path) -> None:
    """What does not depend on the device is shared, the rest has a folder of its own."""
    assert set(built.planned(label="small")) == ALLOCATED | {"device", "preflight", "all"}
    done = built.run("--dry-run", label="small")
    assert "pixel6+small/publish.json" in done.stdout + done.stderr
    assert built.planned() == {}
