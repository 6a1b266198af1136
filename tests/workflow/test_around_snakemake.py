"""What around_snakemake.py takes from Snakemake beyond its documented interface is there, and is used well."""

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import snakemake.api  # noqa: F401  before its other modules, which import each other
from snakemake.workflow import DAG, Workflow
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry
from snakemake_interface_executor_plugins.settings import CommonSettings
from snakemake_storage_plugin_s3 import StorageObject

from coldpress.compiler.device import memory
from coldpress.compiler.workflow import around_snakemake
from coldpress.schemas.errors import ColdpressError

LOCAL = CommonSettings(non_local_exec=False, implies_no_shared_fs=False, job_deploy_sources=False)
DRY = replace(LOCAL, dryrun_exec=True)
REMOTE = replace(LOCAL, non_local_exec=True)


def stand_in(called: list[str], main: bool = True, **limits: int) -> Any:
    """A workflow of which the module sees what it uses."""
    found = SimpleNamespace(
        is_main_process=main,
        cores=2,
        executor_plugin=None,
        global_resources=limits,
        storage_settings=SimpleNamespace(default_storage_provider=None, default_storage_prefix=None),
        storage_registry=None,
        workdir=lambda folder: called.append(f"workdir {folder}"),
        execute=lambda **_: called.append("execute"),
    )
    found.register_resource = lambda name, value: called.append(f"{name}={value}")
    return found


def build_in(folder: Path) -> Any:
    """A stand-in for a build of a model in `folder`; it has what the module uses."""
    return SimpleNamespace(
        workdir=folder, folder=folder / "tiny", target="pixel6", target_folder=folder / "tiny/pixel6", pins={}
    )


def test_the_pinned_version_has_what_is_used() -> None:
    assert "executor_plugin" in inspect.signature(Workflow.execute).parameters
    for name in ("executor_plugin", "register_resource", "workdir", "dag", "is_main_process", "dryrun", "enable_cache"):
        assert hasattr(Workflow, name), name
    assert hasattr(DAG, "needrun_jobs")
    assert "is_dir" in vars(StorageObject), "the S3 plug-in has what is replaced"
    registry = ExecutorPluginRegistry()
    executors = {"local": (True, False), "dryrun": (True, True), "slurm": (False, False)}
    for name in registry.plugins.keys() & executors:
        settings = registry.get_plugin(name).common_settings
        assert (settings.local_exec, settings.dryrun_exec) == executors[name]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests end where they began."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("settings", "facts", "limited"),
    [
        (LOCAL, {}, ["mem_mb=5000"]),
        (LOCAL, {"mem_mb": 4000}, []),  # the user's
        (REMOTE, {}, []),  # a cluster has limits of its own
        (LOCAL, {"main": False}, []),  # one job of a cluster
    ],
)
def test_memory_of_this_machine_limits_what_runs_side_by_side(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: CommonSettings,
    facts: dict[str, Any],
    limited: list[str],
) -> None:
    monkeypatch.setattr(memory, "free_dram_bytes", lambda: 5_000_000_000)
    called: list[str] = []
    workflow = stand_in(called, **facts)
    around_snakemake.work_in(workflow, [build_in(tmp_path)])
    workflow.execute(executor_plugin=SimpleNamespace(common_settings=settings))
    assert called == [f"workdir {tmp_path}", *limited, "execute"]


def test_the_cores_of_this_machine_count_where_jobs_run_here() -> None:
    workflow = stand_in([])
    for settings, threads in ((LOCAL, 2), (REMOTE, None)):
        workflow.executor_plugin = SimpleNamespace(common_settings=settings)
        assert around_snakemake.threads_here(workflow) == threads


@pytest.mark.parametrize(
    ("settings", "main", "locked"), [(LOCAL, True, True), (DRY, True, False), (LOCAL, False, False)]
)
def test_a_run_holds_the_lock_and_a_look_does_not(
    tmp_path: Path, settings: CommonSettings, main: bool, locked: bool
) -> None:
    """Nor does the snakemake of a job, whose build holds it."""
    workflow = stand_in([], main, mem_mb=1)
    held: list[bool] = []
    workflow.execute = lambda **_: held.append((tmp_path / "tiny/.lock").exists())
    around_snakemake.work_in(workflow, [build_in(tmp_path)])
    workflow.execute(executor_plugin=SimpleNamespace(common_settings=settings))
    assert held == [locked]


class Stored:
    """An object of a store: whether it exists, and its content."""

    def __init__(self, content: str | None) -> None:
        self.content, self.path = content, Path()

    def exists(self) -> bool:
        return self.content is not None

    def set_local_path(self, path: Path) -> None:
        self.path = path

    def retrieve_object(self) -> None:
        self.path.write_text(self.content or "")


class Provider:
    """Gives every object of a store the same content, or none."""

    def __init__(self, content: str | None) -> None:
        self.content = content

    def object(self, query: str) -> Stored:
        return Stored(self.content)


def storing(content: str | None) -> Any:
    """A workflow whose results lie in a store; every object there has this content, or is missing."""
    workflow = stand_in([], mem_mb=1)
    workflow.storage_settings = SimpleNamespace(default_storage_provider="other", default_storage_prefix="s3://a/b/")
    workflow.storage_registry = SimpleNamespace(default_storage_provider=Provider(content))
    return workflow


def test_results_lie_in_a_store_if_there_is_one() -> None:
    workflow = storing(None)
    assert around_snakemake.stores(workflow)
    assert workflow.storage_settings.default_storage_prefix == "s3://a/b", "the names of results begin behind it"
    assert not around_snakemake.stores(stand_in([]))


def test_results_that_another_folder_stored_are_refused(tmp_path: Path) -> None:
    for content, folder, refused in ((None, "mine", False), ("{}", "mine", False), ("{}", "other", True)):
        workflow = storing(content)
        around_snakemake.work_in(workflow, [build_in(tmp_path / folder)])
        if refused:
            with pytest.raises(SystemExit):
                workflow.execute(executor_plugin=SimpleNamespace(common_settings=LOCAL))
        else:
            workflow.execute(executor_plugin=SimpleNamespace(common_settings=LOCAL))


def test_a_record_is_fetched_from_the_store_once_it_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    assert around_snakemake.record_here(stand_in([]), folder, "ingest") == folder / "ingest.json"
    assert not around_snakemake.record_here(storing(None), folder, "ingest").exists()
    assert around_snakemake.record_here(storing("{}"), folder, "ingest").read_text() == "{}"
    assert not around_snakemake.record_here(storing(None), folder, "ingest").exists()


def test_results_without_records_are_refused(tmp_path: Path) -> None:
    """Also where the folder's Snakemake knows of another model."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/ingest.json").touch()
    known = tmp_path / ".snakemake" / "models"
    known.mkdir(parents=True)
    (known / "other").touch()
    with pytest.raises(ColdpressError, match=r"made the results in .*/tiny: .*/models/tiny is missing"):
        around_snakemake.work_in(stand_in([]), [build_in(tmp_path)])
    (known / "tiny").touch()
    around_snakemake.work_in(stand_in([]), [build_in(tmp_path)])


def test_a_link_to_a_deleted_artifact_is_no_output(tmp_path: Path) -> None:
    """Snakemake 9.27 would end with an error of its own; the link to one that stands is left."""
    link, other = (tmp_path / "tiny/pixel6" / name for name in ("manifest.json", "package/manifest.json"))
    other.parent.mkdir(parents=True)
    link.symlink_to("gone.coldpress/manifest.json")
    (tmp_path / "there").touch()
    other.symlink_to(tmp_path / "there")
    around_snakemake.work_in(stand_in([]), [build_in(tmp_path)])
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
