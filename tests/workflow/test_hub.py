"""The command of the README, as it stands there, against a stand-in of the hub on this machine.

The client is the real one; the model is a small Mistral with as many layers as its profile says, under its name.
Snakemake and the jobs that ask the hub are new interpreters, which read where it is; the other jobs are forked.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coldpress.compiler.io import load_record
from coldpress.compiler.profiles import load_model
from coldpress.compiler.stages.tokenize.pydoc import documents
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.schemas.corpus import Corpus
from tests.support.hub import Hub, Repository, serving, write_wikitext
from tests.support.models import write_model
from tests.support.workflow import STRIP_EDITABLE, Workflow

COMMAND = ("snakemake", "--config", "model=mistral-7b", "device=pixel6")
BREAKS_BYTES = 1 << 20
PYTHON = """#!/bin/sh
case "$3" in ingest | tokenize) exec {python} "$@" ;; esac
exec {warm} "$@"
"""
RECORD_CHARS = 200


def records(split: str, count: int) -> list[str]:
    """Returns short records of Python's documentation: a few blocks of tokens keep the build short."""
    texts = (text[start : start + RECORD_CHARS] for text in documents(split) for start in range(0, 4000, RECORD_CHARS))
    return [text for text, _ in zip(texts, range(count), strict=False)]


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Hub]:
    """A hub with the profile's model and corpus, at the commits that the profile names."""
    profile = load_model("mistral-7b")
    model = write_model(tmp_path / "model", "mistral", num_hidden_layers=32, context=1024, dtype="bfloat16")
    texts = {"train": records("calibration", 30), "validation": records("validation", 8), "test": records("test", 8)}
    corpus, _, subset = str(profile.settings["corpus"]).partition(":")
    data = write_wikitext(tmp_path / "data", texts, subset)
    repositories = {
        f"models/{profile.source}": Repository(
            model, str(profile.revision), breaks={"model.safetensors": BREAKS_BYTES}
        ),
        f"datasets/{corpus}": Repository(data, str(profile.settings["corpus_revision"])),
    }
    with serving(repositories) as found:
        yield found


@pytest.fixture
def clone(workflow: Workflow, tmp_path: Path) -> Workflow:
    """A fresh copy of the checkout, in which the command runs."""
    return replace(workflow, folder=Path(shutil.copytree(workflow.tree, tmp_path / "clone", symlinks=True)))


def build(clone: Workflow, url: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a copy of the checkout, in an environment that knows only this hub."""
    folder = clone.folder
    environment = {name: value for name, value in clone.environment().items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["PYTHONPATH"] = os.pathsep.join([str(site_of_jobs(clone)), environment["PYTHONPATH"]])
    return subprocess.run(COMMAND, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def site_of_jobs(clone: Workflow) -> Path:
    """Returns a folder for PYTHONPATH, in which Python takes the program of this test for itself."""
    folder = clone.folder / ".site"
    folder.mkdir(exist_ok=True)
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable, warm=clone.server.python()))
    python.chmod(0o755)
    (folder / "sitecustomize.py").write_text(f"{STRIP_EDITABLE}sys.executable = {str(python)!r}\n")
    return folder


@pytest.mark.slow
@pytest.mark.readme
def test_the_command(there: Hub, clone: Workflow) -> None:
    profile = load_model("mistral-7b")
    done = build(clone, there.url)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"note: mistral-7b ({profile.source} at {profile.revision}, apache-2.0): " in done.stderr
    assert "are to be downloaded" in done.stderr
    folder = clone.folder / "build" / "mistral-7b"
    artifact = open_artifact(folder / "pixel6" / "mistral-7b-pixel6.coldpress")
    source = artifact.manifest.source
    assert (source.source, source.revision) == (profile.source, profile.revision)
    assert load_record(folder / "tokenize.json", Corpus).revision == profile.settings["corpus_revision"]
    assert verify_artifact(artifact) > 0
    fetched = [method for method, *_ in there.asked_for("/model.safetensors")].count("GET")
    assert fetched == 2, "the download broke off once and went on"
    there.close()
    again = build(clone, there.url)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "everything is up to date" in again.stdout


@pytest.mark.slow
@pytest.mark.readme
def test_a_hub_that_cannot_be_reached(there: Hub, clone: Workflow) -> None:
    there.close()
    done = build(clone, there.url)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "is not in the local cache and the hub cannot be reached; check the network"
    )


@pytest.mark.slow
@pytest.mark.readme
def test_a_gated_model(there: Hub, clone: Workflow) -> None:
    profile = load_model("mistral-7b")
    there.repositories[f"models/{profile.source}"].is_gated = True
    done = build(clone, there.url)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: {profile.source} at revision {profile.revision} is gated: accept its licence on the hub and log in "
        "with `hf auth login`"
    )
