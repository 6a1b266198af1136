"""A build whose results lie in an object store, and whose jobs share no file system: no job sees more than its rule
declares."""

from pathlib import Path

import pytest

from tests.support import pods, warm
from tests.support.stages import DEFAULT
from tests.support.workflow import Workflow

HERE = {"ingest", "tokenize", "device", "package", "verify", "publish", "report"}
"""Stages that run where snakemake runs: they read files from outside, or the artifact, which stays there."""


def remote_jobs(output: str) -> set[str]:
    """The rules that snakemake submitted: it calls the others local."""
    return {line.split()[1].removesuffix(":") for line in output.splitlines() if line.startswith("rule ")}


@pytest.mark.slow
def test_jobs_without_a_shared_file_system_give_the_same_artifact(built: Workflow, tmp_path: Path) -> None:
    folder = tmp_path / "driver" / "deeper"
    with pods.store() as store:
        arguments = (*pods.STORED, *pods.cluster(tmp_path / "cluster"))

        def run(folder: Path, *more: str, **changes: object) -> tuple[int, str]:
            running = warm.start(folder, *arguments, *more, more=store.environment, **{**built.config, **changes})
            return running.wait(), running.said()

        code, said = run(folder, dram_budget="1kB", preflight="off")
        assert code == 2
        assert said.splitlines()[-1].startswith("error: a DRAM budget of "), "it is the sentence of a job elsewhere"
        code, said = run(folder)
        assert code == 0, said[-6000:]
        here = built.at(folder)
        assert here.identity() == built.identity()
        assert remote_jobs(said) | {"calibrate"} == set(DEFAULT) - HERE, "calibrate had ended before the refusal"
        assert "tiny/pixel6/quantize/000-002.json" in store.names(), "each model has a folder in the store"
        assert not (here.device / "quantize").exists()
        code, said = run(folder, "--dry-run")
        assert "Nothing to be done" in said, said[-3000:]
        code, said = run(tmp_path / "other" / "deeper")
        assert code == 2
        assert f"the results in {pods.PREFIX}/tiny were made from another folder" in said.splitlines()[-1]
