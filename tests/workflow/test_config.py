"""Bad configuration: one sentence and exit code 2 from snakemake itself, and nothing written."""

import shutil
from pathlib import Path

import pytest

from coldpress.compiler.workflow.settings import resolve
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.schemas.errors import ColdpressError
from tests.support.gguf_cases import exported
from tests.support.workflow import Workflow


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model": "relu-dmeo"}, "error: unknown model 'relu-dmeo'. Did you mean 'relu-demo'? Known: "),
        ({"device": "pixel66"}, "error: unknown device 'pixel66'. Did you mean 'pixel6'? Known: "),
        ({"formatt": "fp16"}, "error: unknown config key 'formatt'. Did you mean 'format'?"),
        (
            {"max_ppl_ratio": "loose"},
            "error: config key 'max_ppl_ratio' is 'loose', expected a number above 0 or off: ",
        ),
        ({"label": "../up"}, "error: config key 'label' is '../up', expected text: letters, digits"),
        (
            {"density": "2"},
            "error: config key 'density' is 2, expected a number above 0 and at most 1: share of the MLP's weights "
            "that a token uses",
        ),
    ],
)
def test_bad_configuration(workflow: Workflow, tmp_path: Path, config: dict[str, object], sentence: str) -> None:
    elsewhere = workflow.at(tmp_path)
    done = elsewhere.run(**config)
    assert done.returncode == 2
    *notes, line = done.stderr.splitlines()
    assert line.startswith(sentence)
    assert [note for note in notes if not note.startswith("Using workflow specific profile")] == []
    assert not (tmp_path / "build").exists()


def test_a_budget_that_cannot_hold_the_resident_part(built: Workflow, tmp_path: Path) -> None:
    """It is refused before the first job, with exit code 2, and leaves the artifact that was there."""
    copy = built.at(tmp_path)  # as deep as the build, whose records hold relative paths
    shutil.copytree(built.folder, copy.folder, dirs_exist_ok=True, symlinks=True)
    done = copy.run("--quiet", "all", dram_budget=1000)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: a DRAM budget of 1,000 bytes was asked for")
    assert copy.identity() == built.identity()
    assert verify_artifact(open_artifact(copy.artifact)) > 0


def test_the_format_of_a_dense_build_of_a_gguf_file_is_open(tmp_path: Path) -> None:
    """It keeps the file's own formats (tests/compiler/test_kept_codes.py)."""
    _, file = exported(tmp_path, "llama", {})

    def format_of(model: Path, method: str, **config: str) -> object:
        return resolve({"model": str(model), "device": "pixel6", "method": method, **config}).values["format"]

    assert format_of(file, "auto") == format_of(file, "dense") == "auto"
    assert format_of(file, "dense", format="fp16") == "fp16"
    assert format_of(file, "topk") == "int4_group32", "columns of down projections are rounded anyway"
    with pytest.raises(ColdpressError, match="format=auto was asked for, and method=topk"):
        format_of(file, "topk", format="auto")
