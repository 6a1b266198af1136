"""The working directory plays no part: what a build knows of its results lies in the build folder."""

import shutil
from pathlib import Path

import pytest

from tests.support.stages import DEFAULT, between
from tests.support.workflow import Workflow

FROM_THE_END = {"preflight", "publish", "report", "all"}


def elsewhere(build: Workflow, folder: Path, **config: object) -> Workflow:
    """The same build folder, in a build that is called from `folder`."""
    return build.at(folder, build_dir=build.folder / "build", **config)


@pytest.mark.slow
def test_nothing_is_to_be_done_from_another_folder(built: Workflow, tmp_path: Path) -> None:
    assert elsewhere(built, tmp_path / "deep" / "er").planned() == {}
    link = tmp_path / "link"
    link.symlink_to(built.folder)
    assert built.at(tmp_path, build_dir="link/build").planned() == {}


def test_a_changed_setting_is_seen_from_another_folder(built: Workflow, tmp_path: Path) -> None:
    changed = {"format": "fp16", "dram_budget": "50%"}
    assert set(elsewhere(built, tmp_path).planned(**changed)) == {*between("allocate", "report"), "preflight", "all"}


@pytest.mark.slow
def test_what_was_built_from_another_folder_is_known_here(built: Workflow, tmp_path: Path) -> None:
    """There and back again: this folder's own past says nothing."""
    here = built.at(tmp_path)  # as deep as the build, whose records hold relative paths
    shutil.copytree(built.folder, here.folder, dirs_exist_ok=True, symlinks=True)
    there = elsewhere(here, tmp_path / "there", max_ppl_ratio="off")
    assert set(there.planned()) == FROM_THE_END
    there.build()
    assert there.planned() == {}
    assert set(here.planned()) == FROM_THE_END


@pytest.mark.slow
def test_results_of_which_nothing_is_known_are_refused(built: Workflow, tmp_path: Path) -> None:
    """Without its records Snakemake would take them for good, whatever the settings; nothing is touched."""
    copy = built.at(tmp_path)
    shutil.copytree(
        built.folder, copy.folder, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns(".snakemake")
    )
    done = copy.run(format="fp16")
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"error: nothing says what made the results in {copy.model}: ")
    (copy.model / "ingest.json").unlink()
    assert copy.run(format="fp16").returncode == 2, "other results are there"
    shutil.rmtree(copy.model)
    assert set(copy.planned()) == {*DEFAULT, "device", "all"}


@pytest.mark.slow
def test_with_another_store_of_metadata_nothing_is_made_again(workflow: Workflow, tmp_path: Path) -> None:
    """Snakemake's database instead of its files: what a build knows is there, too."""
    build = workflow.at(tmp_path)
    backend = ("--persistence-backend", "db")
    done = build.run(*backend, "--until", "tokenize")
    assert done.returncode == 0, done.stderr[-3000:]
    again = build.run(*backend, "--until", "tokenize")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "Finished jobid" in done.stdout + done.stderr
    assert "Finished jobid" not in again.stdout + again.stderr
