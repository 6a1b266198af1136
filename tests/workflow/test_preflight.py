"""preflight in the workflow: it goes first, ends the run when it refuses, and its sums hold for whole builds."""

from pathlib import Path

import pytest

from coldpress.compiler.io import load_record
from coldpress.schemas.preflight import Preflight
from tests.support.workflow import Workflow


@pytest.mark.slow
def test_a_refusal_comes_before_any_long_stage(workflow: Workflow, tmp_path: Path) -> None:
    """With cores to spare, too: otherwise calibrate, which needs the same records, would start beside it."""
    refused = workflow.at(tmp_path)
    done = refused.run(cores=16, calibration_shards=900)  # only the text tells that they are too many
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: calibration_shards=900 was asked for, the text has ")
    assert (refused.device / "logs" / "preflight.log").exists()
    assert not list((refused.folder / "build").rglob("calibrate*"))
    device, model = refused.device / "device.json", refused.device.parent / "ingest.json"
    assert device.stat().st_mtime_ns < model.stat().st_mtime_ns, "a slow device would let calibrate begin"


def test_what_a_build_leaves_is_what_was_announced(built: Workflow) -> None:
    found = load_record(built.device / "preflight.json", Preflight)
    assert found.trial_layers == 0, "a small model is simply built"
    for needs in found.stages:
        homes = [built.artifact] if needs.stage == "package" else [top / needs.stage for top in tops(built)]
        written = sum(file.stat().st_size for home in homes for file in home.rglob("*") if file.is_file())
        records = 4096 * len(list(built.device.glob(f"{needs.stage}*/*")))
        assert written <= needs.disk_bytes + records, needs.stage


def tops(built: Workflow) -> tuple[Path, Path]:
    return built.device.parent, built.device


def test_a_hub_model_that_cannot_be_had_ends_the_run_before_any_job(workflow: Workflow, tmp_path: Path) -> None:
    refused = workflow.at(tmp_path, model="qwen2.5-0.5b", revision="a" * 40, corpus="pydoc")
    done = refused.run()
    assert done.returncode == 2
    assert "is not in the local cache and the hub cannot be reached; allow the network once" in done.stderr
    assert not list((refused.folder / "build").rglob("*.log"))
