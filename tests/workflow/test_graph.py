"""The shape of the DAG, from dry runs: one rule per stage, chunks of layers, and every profile of the repository."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from compiler.__main__ import STAGES
from compiler.profiles import device_names, model_names
from tests.workflow.conftest import NUM_LAYERS, Workflow

COMMIT = "a" * 40
OPTIONAL = {"distill", "predict"}


def test_every_stage_is_a_job(workflow: Workflow, tmp_path: Path) -> None:
    jobs = workflow.at(tmp_path).planned()
    assert set(jobs) == (set(STAGES) - {"distill"}) | {"all", "device"}
    assert {rule for rule, count in jobs.items() if count == 2} == {"predict", "order", "quantize"}
    assert workflow.at(tmp_path, layers_per_job=1).planned()["order"] == NUM_LAYERS


def test_distill_and_methods_change_the_graph(workflow: Workflow, tmp_path: Path) -> None:
    assert workflow.at(tmp_path).planned(distill="true")["distill"] == 1
    assert "predict" not in workflow.at(tmp_path).planned(method="relu")


def test_every_profile_dry_runs(workflow: Workflow, tmp_path: Path) -> None:
    """Each model with one device, so that each device takes part too."""
    devices = device_names()
    pairs = [(model, devices[i % len(devices)]) for i, model in enumerate(model_names())]
    assert {device for _, device in pairs} == set(devices)

    def jobs(pair: tuple[str, str]) -> dict[str, int]:
        model, device = pair
        revision = {} if model == "demo" else {"revision": COMMIT}
        plain = Workflow(workflow.tree, tmp_path / model, {"model": model, "device": device, **revision})
        plain.folder.mkdir()
        return plain.planned()

    with ThreadPoolExecutor(2) as pool:
        for pair, planned in zip(pairs, pool.map(jobs, pairs), strict=True):
            assert planned["package"] == 1, pair


@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_executor_profiles_dry_run(workflow: Workflow, tmp_path: Path, name: str) -> None:
    profile = workflow.tree / "profiles" / name
    settings = yaml.safe_load((profile / "profile.yaml").read_text())
    assert settings["executor"] == name
    if importlib.util.find_spec(f"snakemake_executor_plugin_{name}") is None:
        pytest.skip(f"the executor plugin for {name} is not installed")
    done = workflow.at(tmp_path).run("--dry-run", "--profile", str(profile))
    assert done.returncode == 0, done.stderr
