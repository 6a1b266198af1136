"""What around_snakemake.py takes from Snakemake beyond its documented interface is there, and is used well."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import snakemake.api  # noqa: F401  before its other modules, which import each other
from snakemake.workflow import DAG, Workflow
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecMode

from coldpress.compiler.device import host
from coldpress.compiler.workflow import around_snakemake
from coldpress.schemas.errors import ColdpressError


def stand_in(called: list[str], remote: bool = False, mode: ExecMode = ExecMode.DEFAULT, **limits: int) -> Any:
    """A workflow of which the module sees what it uses."""
    found = SimpleNamespace(
        exec_mode=mode,
        remote_exec=remote,
        overwrite_workdir=None,
        global_resources=limits,
        workdir=lambda folder: called.append(f"workdir {folder}"),
        execute=lambda **_: called.append("execute"),
    )
    found.register_resource = lambda name, value: called.append(f"{name}={value}")
    return found


def test_the_pinned_version_has_what_is_used() -> None:
    assert "executor_plugin" in inspect.signature(Workflow.execute).parameters
    for name in ("exec_mode", "remote_exec", "register_resource", "workdir", "dag", "is_main_process", "dryrun"):
        assert hasattr(Workflow, name) or name in inspect.signature(Workflow.__init__).parameters, name
    assert "dryrun_exec" in inspect.signature(CommonSettings).parameters
    assert hasattr(DAG, "needrun_jobs")


@pytest.mark.parametrize(
    ("facts", "limited"),
    [
        ({}, ["mem_mb=5000"]),
        ({"mem_mb": 4000}, []),  # the user's
        ({"remote": True}, []),  # a cluster has limits of its own
        ({"mode": ExecMode.REMOTE}, []),  # one job
    ],
)
def test_memory_of_this_machine_limits_what_runs_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], limited: list[str]
) -> None:
    monkeypatch.setattr(host, "free_dram_bytes", lambda: 5_000_000_000)
    called: list[str] = []
    around_snakemake.work_in(stand_in(called, **facts), tmp_path, "pixel6")
    assert called == [f"workdir {tmp_path}", *limited]


@pytest.mark.parametrize(
    ("dry", "mode", "locked"), [(False, "DEFAULT", True), (True, "DEFAULT", False), (False, "REMOTE", False)]
)
def test_a_run_holds_the_lock_and_a_look_does_not(tmp_path: Path, dry: bool, mode: str, locked: bool) -> None:
    """Nor does the snakemake of a job, whose build holds it."""
    workflow = stand_in([], mode=ExecMode[mode], mem_mb=1)
    held: list[bool] = []
    workflow.execute = lambda **_: held.append((tmp_path / ".lock").exists())
    around_snakemake.work_in(workflow, tmp_path, "pixel6")
    workflow.execute(executor_plugin=SimpleNamespace(common_settings=SimpleNamespace(dryrun_exec=dry)))
    assert held == [locked]


def test_results_without_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ingest.json").touch()
    with pytest.raises(ColdpressError, match=r"nothing says what made the results in .*: \.snakemake is missing there"):
        around_snakemake.work_in(stand_in([]), tmp_path, "pixel6")
    (tmp_path / ".snakemake").mkdir()
    around_snakemake.work_in(stand_in([]), tmp_path, "pixel6")


def test_a_link_to_a_deleted_artifact_is_no_output(tmp_path: Path) -> None:
    """Snakemake 9.27 would end with an error of its own; the link to one that stands is left."""
    link, other = tmp_path / "pixel6" / "manifest.json", tmp_path / "pixel6" / "package" / "manifest.json"
    other.parent.mkdir(parents=True)
    link.symlink_to("gone.coldpress/manifest.json")
    (tmp_path / "there").touch()
    other.symlink_to(tmp_path / "there")
    around_snakemake.work_in(stand_in([]), tmp_path, "pixel6")
    assert (link.is_symlink(), other.is_symlink()) == (False, True)


def test_the_stages_are_those_that_the_targets_need() -> None:
    def rule(**inputs: Any) -> Any:
        return SimpleNamespace(input=inputs)

    rules = SimpleNamespace(
        ingest=rule(),
        tokenize=rule(model="ingest.json"),
        calibrate=rule(model="ingest.json", corpus="tokenize.json", shards=["calibrate-shards/0.json"]),
        order=rule(activations="calibrate.json", device="pixel6/device.json"),
        layout=rule(order=["pixel6/order/000-001.json", "pixel6/order/002-003.json"], predictors=[]),
        size=rule(model="ingest.json"),
    )
    assert around_snakemake.inputs_of(rules, ["layout"]) == {
        "ingest": {},
        "tokenize": {"model": "ingest"},
        "calibrate": {"model": "ingest", "corpus": "tokenize"},
        "order": {"activations": "calibrate", "device": "device"},
        "layout": {"order": "order"},
    }
