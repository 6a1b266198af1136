"""The shape of the DAG, from dry runs: one rule per stage, chunks of layers, and every profile of the repository."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.profiles import model_names
from coldpress.runtime.device_profiles.devices import device_names
from tests.support import pods
from tests.support.stages import DEFAULT
from tests.support.workflow import NUM_LAYERS, Workflow

COMMIT = "a" * 40
DRY_RUNS = """
import json, sys
from pathlib import Path
from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, OutputSettings, Quietness, ResourceSettings
for config in json.loads(sys.argv[2]):
    with SnakemakeApi(OutputSettings(dryrun=True, quiet={Quietness.ALL})) as api:
        workflow = api.workflow(
            resource_settings=ResourceSettings(cores=2),
            config_settings=ConfigSettings(config=config),
            snakefile=Path(sys.argv[1]),
        )
        workflow.dag().execute_workflow(executor="dryrun")
    print(config["model"])
"""


@pytest.mark.slow
def test_every_stage_is_a_job(workflow: Workflow, tmp_path: Path) -> None:
    jobs = workflow.at(tmp_path).planned()
    assert set(jobs) == {*DEFAULT, "all", "device"}
    assert {rule for rule, count in jobs.items() if count == 2} == {"predict", "order", "quantize"}
    assert workflow.at(tmp_path, layers_per_job=1).planned()["order"] == NUM_LAYERS


@pytest.mark.slow
def test_distill_and_methods_change_the_graph(workflow: Workflow, tmp_path: Path) -> None:
    assert workflow.at(tmp_path).planned(distill="true")["distill"] == 1
    assert workflow.at(tmp_path).planned(relufy="relu")["relufy"] == 1
    assert not {"predict", "size"} & set(workflow.at(tmp_path).planned(method="relu"))
    assert workflow.at(tmp_path).planned(algorithm="gptq")["gram"] == 1
    assert workflow.at(tmp_path).planned(imatrix=workflow.imatrix)["importance"] == 1
    assert workflow.at(tmp_path).planned(export="gguf", gguf_type="F16")["export"] == 1


def test_calibration_is_shared_out(workflow: Workflow, tmp_path: Path) -> None:
    jobs = workflow.at(tmp_path).planned(calibration_shards=3)
    assert (jobs["calibrate_shard"], jobs["recalibrate_shard"]) == (3, 3)
    assert (jobs["calibrate"], jobs["recalibrate"]) == (1, 1), "which put the shards together"


@pytest.mark.slow
def test_every_profile_dry_runs(workflow: Workflow, tmp_path: Path) -> None:
    """Each model with one device, so that each device takes part too; in one process, to save its start."""
    devices = device_names()
    pairs = [(model, devices[i % len(devices)]) for i, model in enumerate(model_names())]
    assert {device for _, device in pairs} == set(devices)
    configs = [
        {
            "model": model,
            "device": device,
            **({} if model == "relu-demo" else {"revision": COMMIT}),
        }
        for model, device in pairs
    ]
    done = subprocess.run(
        [sys.executable, "-c", DRY_RUNS, str(workflow.tree / "Snakefile"), json.dumps(configs)],
        cwd=tmp_path,
        env=workflow.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [model for model, _ in pairs]


EXECUTORS = {
    "slurm": (),
    "kubernetes": ("--default-storage-prefix", "s3://bucket/builds", "--container-image", "image"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXECUTORS)
def test_executor_profiles_dry_run(
    workflow: Workflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    profile = workflow.tree / "profiles" / name
    settings = yaml.safe_load((profile / "profile.yaml").read_text())
    assert settings["executor"] == name
    if importlib.util.find_spec(f"snakemake_executor_plugin_{name}") is None:
        pytest.skip(f"the executor plugin {name} is not installed")
    with pods.store() as store:
        for variable, value in store.environment.items():
            monkeypatch.setenv(variable, value)
        told = ("--dry-run", "--profile", str(profile), *EXECUTORS[name])
        done = workflow.at(tmp_path, calibration_shards=2).run(*told)
    assert done.returncode == 0, done.stderr
    assert {entry.partition("=")[0] for entry in settings.get("groups", ())} <= set(STAGES)
