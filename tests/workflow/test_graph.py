"""The shape of the DAG, from dry runs: one rule per stage, chunks of layers, and every profile of the repository."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.profiles import model_names
from coldpress.runtime.profiles.devices import device_names
from tests.support.data import ROOT
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
            **({} if model == "demo" else {"revision": COMMIT, "corpus_revision": COMMIT}),
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


@pytest.mark.parametrize(("name", "plugin"), [("slurm", "slurm"), ("kubernetes", "cluster_generic")])
def test_executor_profiles_dry_run(workflow: Workflow, tmp_path: Path, name: str, plugin: str) -> None:
    profile = workflow.tree / "profiles" / name
    settings = yaml.safe_load((profile / "profile.yaml").read_text())
    assert settings["executor"] == plugin.replace("_", "-")
    if importlib.util.find_spec(f"snakemake_executor_plugin_{plugin}") is None:
        pytest.skip(f"the executor plugin {plugin} is not installed")
    done = workflow.at(tmp_path, calibration_shards=2).run("--dry-run", "--profile", str(profile))
    assert done.returncode == 0, done.stderr
    assert {entry.partition("=")[0] for entry in settings["groups"]} <= set(STAGES)


KUBECTL = """#!/usr/bin/env bash
if [ "$1" = create ]; then cat > "$KUBECTL_GOT"; echo job.batch/coldpress-x; else printf %s "$KUBECTL_STATUS"; fi
"""


def test_kubernetes_submits_a_job_on_the_shared_volume(tmp_path: Path) -> None:
    """With a stand-in for kubectl: the manifest it is given, and what its answers mean."""
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    names = {"COLDPRESS_IMAGE": "image:1", "COLDPRESS_CLAIM": "claim", "COLDPRESS_MOUNT": "/shared"}
    environment = {**os.environ, **names, "KUBECTL_GOT": str(tmp_path / "got.yaml")}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    folder = ROOT / "profiles" / "kubernetes"

    def call(*command: str, **more: str) -> str:
        return subprocess.run(
            command, cwd=tmp_path, env={**environment, **more}, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert call(str(folder / "submit"), "4", "8000", "/shared/job.sh") == "job.batch/coldpress-x"
    pod = yaml.safe_load((tmp_path / "got.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["image"], container["command"], container["workingDir"]) == (
        "image:1",
        ["bash", "/shared/job.sh"],
        str(tmp_path),
    )
    assert container["resources"]["requests"] == {"cpu": "4", "memory": "8000M"}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim"}
    for answer, meaning in {"1/": "success", "/1": "failed", "/": "running"}.items():
        assert call(str(folder / "status"), "job.batch/coldpress-x", KUBECTL_STATUS=answer) == meaning
