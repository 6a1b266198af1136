"""A draft model is built beside the model that it drafts for, once, and becomes a part of its artifact."""

import json
from pathlib import Path

import pytest

from coldpress.compiler.workflow.matrix import asked, builds_of
from coldpress.compiler.workflow.settings import resolve
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.schemas.errors import ColdpressError
from tests.support.models import write_corpus, write_model
from tests.support.workflow import Workflow

KEYS = {
    "corpus": "corpus.txt",
    "calibration_tokens": 512,
    "evaluation_tokens": 256,
    "context_length": 64,
    "method": "dense",
    "max_logit_error": "off",
    "min_top1_agreement": "off",
    "max_ppl_ratio": "off",
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A model of eleven layers, and a small one with the same tokenizer."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.txt", 200)
    large = write_model(tmp_path / "large", num_hidden_layers=11, hidden_size=128, intermediate_size=1024)
    return str(large), str(write_model(tmp_path / "small", num_hidden_layers=2))


def test_the_draft_model_is_dense_and_whole_on_the_same_text(models: tuple[str, str]) -> None:
    model, small = models
    build = resolve({**KEYS, "model": model, "draft_model": small, "device": "oneplus12"})
    draft = build.draft
    assert draft is not None
    assert (draft.model.name, draft.target) == ("small", "oneplus12+draft-64")
    assert (draft["method"], draft["dram_budget"], draft["draft"]) == ("dense", "100%", "off")
    for stage in ("tokenize",):
        assert draft.of_stage(stage) == build.of_stage(stage)
    assert build["draft"] == "auto"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"draft": "model"}, "draft=model needs a draft model, and there is none; give draft_model=NAME"),
        ({"draft_model": "SMALL", "draft": "off"}, "draft=off leaves it unused"),
        ({"draft_model": "./nowhere"}, "draft_model=./nowhere: model folder nowhere does not exist"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(models: tuple[str, str], keys: dict[str, str], words: str) -> None:
    given = {key: models[1] if value == "SMALL" else value for key, value in keys.items()}
    with pytest.raises(ColdpressError, match=words):
        resolve({**KEYS, "model": models[0], **given})


def test_builds_with_one_draft_model_build_it_once(models: tuple[str, str], tmp_path: Path) -> None:
    cells = f"models: [{{model: {models[0]}}}]\ndevices: [pixel6]\nfloors: [1.02, 1.05]\n"
    keys = {**KEYS, "draft_model": models[1], "method": "auto"}
    del keys["max_ppl_ratio"]
    (tmp_path / "builds.yaml").write_text(cells + f"keys: {json.dumps(keys)}\n")
    builds = builds_of({"matrix": str(tmp_path / "builds.yaml")})
    assert list(builds) == ["draft:small/pixel6+draft-64", "large/pixel6/1.02", "large/pixel6/1.05"]
    assert list(asked(builds)) == ["large/pixel6/1.02", "large/pixel6/1.05"]


@pytest.mark.slow
def test_what_is_taken_from_the_draft_model_s_build_is_its_artifact(
    workflow: Workflow, models: tuple[str, str], tmp_path: Path
) -> None:
    """Its own verification, report and preflight are nobody's."""
    alone = Workflow(workflow.tree, tmp_path, workflow.server)
    jobs = alone.planned(**KEYS, model=models[0], draft_model=models[1], dram_budget="50%")
    assert jobs["draft"] == jobs["package"] == jobs["small.pixel6+draft-64.package"] == 1
    assert not {"verify", "publish", "report", "preflight"} & {
        name.rpartition(".")[2] for name in jobs if name.startswith("small.")
    }


@pytest.mark.slow
def test_a_build_with_a_draft_model_drafts_and_is_built_once(
    workflow: Workflow, models: tuple[str, str], tmp_path: Path
) -> None:
    alone = Workflow(workflow.tree, tmp_path, workflow.server)
    keys = {**KEYS, "model": models[0], "draft_model": models[1], "draft": "model", "dram_budget": "2MB"}
    done = alone.run(**keys)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "drafts, default   model: " in done.stdout
    assert "the tokens are those without drafts" in done.stdout
    (artifact,) = (tmp_path / "build/large/pixel6").glob("*.coldpress")
    (plan,) = open_artifact(artifact).manifest.plans
    assert (plan.draft, plan.dram_budget_bytes) == ("model", 2_000_000)
    assert open_artifact(artifact / "draft").manifest.source.name == "small"
    assert alone.run(**keys).stdout.startswith("everything is up to date")
