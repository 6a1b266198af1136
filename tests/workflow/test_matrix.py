"""The builds of a matrix are one run of snakemake: each job once, and what fails stops nothing else."""

import json
import re
from pathlib import Path

import pytest

from coldpress.cli.main import main
from coldpress.compiler.lock import build_locks, job_lock
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.workflow.last_words import not_built, why_not_built
from coldpress.compiler.workflow.matrix import ALONE, SHARED, builds_of, check_together, modules
from coldpress.compiler.workflow.settings import BuildConfig, resolve
from coldpress.schemas.errors import ColdpressError
from tests.support.models import write_corpus, write_model
from tests.support.stages import DEFAULT
from tests.support.workflow import Workflow

KEYS = """
keys:
  {method: dense, corpus: corpus.txt, calibration_tokens: 512, evaluation_tokens: 256, dram_budget: 90%,
   preflight: "off", max_logit_error: "off", min_top1_agreement: "off"}
"""


def written(folder: Path, text: str, *models: str) -> Path:
    """A matrix in `folder`, beside a corpus and these models."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in models:
        write_model(folder / name, num_hidden_layers=2, relu=True)
    write_corpus(folder / "corpus.txt", 200)
    path = folder / "builds.yaml"
    path.write_text(text + KEYS)
    return path


def planned(workflow: Workflow, *arguments: str, **config: object) -> dict[str, int]:
    """Rule -> number of its jobs, by a dry run that is told nothing else."""
    alone = Workflow(workflow.tree, workflow.folder, workflow.server)
    return alone.planned(*arguments, **config)


@pytest.mark.slow
def test_what_builds_of_a_model_share_is_made_once(workflow: Workflow, tmp_path: Path) -> None:
    text = "models: [{model: one}, {model: two, method: auto}]\ndevices: [pixel6, oneplus12]\nfloors: [1.02, 1.05]"
    written(tmp_path, text, "one", "two")
    jobs = planned(workflow.at(tmp_path), matrix="builds.yaml")
    targets = [f"{device}+ppl{floor}" for device in ("pixel6", "oneplus12") for floor in ("1.02", "1.05")]
    own = {"device", *DEFAULT} - set(SHARED)
    for model, shared in (("one", {"ingest", "tokenize", "calibrate"}), ("two", {"ingest", "tokenize", "calibrate"})):
        for stage in shared:
            assert jobs.pop(f"{model}.{stage}") == 1
        for target in targets:
            for stage in own - {"predict", "size"}:
                assert jobs.pop(f"{model}.{target}.{stage}") > 0
    assert jobs.pop("two.explore") == 1, "each model has its own settings"
    assert jobs.pop("all") == 1
    assert {name.rpartition(".")[2] for name in jobs} <= {"predict", "size"}


def test_the_rules_of_shared_results_are_named_where_builds_are_put_together(workflow: Workflow) -> None:
    """Once as those of a model's first build, once as those that the others leave out; all write beside each other."""
    text = (workflow.tree / "rules" / "builds.smk").read_text()
    listed = re.findall(r"use rule ([\w, ]+) from|exclude ([\w, ]+) as", text)
    assert [{*"".join(names).split(", ")} for names in listed] == [{*SHARED, "calibrate_shard"}] * 2
    for stage in (*STAGES, "device"):
        text = (workflow.tree / "rules" / f"{stage}.smk").read_text()
        record = re.findall(r"(?:record|metrics)=(?:local\()?f\"\{(\w+)\}/", text)[0]
        assert record == ("MODEL" if stage in SHARED else "DEVICE"), stage


def test_only_some_builds_are_made(workflow: Workflow, tmp_path: Path) -> None:
    written(tmp_path, "models: [{model: one}]\ndevices: [pixel6, oneplus12]", "one")
    jobs = planned(workflow.at(tmp_path), matrix="builds.yaml", only="one/oneplus12")
    assert {name.rpartition(".")[0] for name in jobs} == {"", "one", "one.oneplus12"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"only": "one/pixel6"}, "only names builds of a matrix, and there is none"),
        ({"matrix": "builds.yaml", "model": "some"}, "model was given with matrix, whose file names models and keys"),
        ({"matrix": "builds.yaml", "only": "one/phone"}, "only=one/phone: .*builds.yaml has one/pixel6"),
        ({"matrix": "none.yaml"}, "none.yaml: No such file or directory"),
        ({"matrix": "bad.yaml"}, "one/pixel6: unknown config key 'formatt'"),
    ],
)
def test_what_is_no_matrix_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], words: str
) -> None:
    written(tmp_path, "models: [{model: one}]\ndevices: [pixel6]", "one")
    (tmp_path / "bad.yaml").write_text("models: [{model: one, formatt: dense}]\ndevices: [pixel6]")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ColdpressError, match=words):
        builds_of(given)


def resolved(folder: Path, **config: str) -> BuildConfig:
    return resolve({"model": str(folder / "one"), "device": "pixel6", "corpus": str(folder / "corpus.txt"), **config})


def test_builds_that_would_undo_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "", "one")
    monkeypatch.chdir(tmp_path)
    one, other = resolved(tmp_path), resolved(tmp_path, label="b")
    check_together({"a": one, "b": other})
    for second, words in (
        (one, "a and b would both be built in"),
        (resolved(tmp_path, label="b", build_dir="other"), "a and b have two values of build_dir"),
        (
            resolved(tmp_path, label="b", calibration_tokens="1024"),
            "a and b share the results of tokenize, but their settings of it differ",
        ),
    ):
        with pytest.raises(ColdpressError, match=words):
            check_together({"a": one, "b": second})


def test_a_build_alone_has_rules_without_a_name_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "", "one")
    monkeypatch.chdir(tmp_path)
    one, other = resolved(tmp_path), resolved(tmp_path, label="b")
    assert [module[2:] for module in modules({ALONE: one})] == [("", "")]
    assert [module[2:] for module in modules({"a": one, "b": other})] == [
        ("one.pixel6.", "one."),
        ("one.pixel6+b.", None),
    ]


def test_jobs_of_all_models_belong_to_the_build_that_locks_them(tmp_path: Path) -> None:
    with build_locks([tmp_path / "one", tmp_path / "two"]):
        for name in ("one", "two"):
            with job_lock(tmp_path / name, "calibrate"):
                pass


def test_why_a_build_was_not_made_is_read_as_it_was_written() -> None:
    assert why_not_built(not_built("one/pixel6", "error: the disk is full")) == ("one/pixel6", "the disk is full")
    assert why_not_built("note: an artifact was left as it is") is None
    assert why_not_built("error: one/pixel6 was not built: the disk is full") is None


@pytest.mark.slow
@pytest.mark.usefixtures("forked_jobs")
def test_a_build_that_fails_stops_no_other_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The finished one is what snakemake makes alone, and neither makes again what the other one made."""
    names = ("one", "two", "empty", "none")
    models = ", ".join(f"{{model: {name}{', dram_budget: 1kB' if name == 'two' else ''}}}" for name in names)
    path = written(tmp_path, f"models: [{models}]\ndevices: [pixel6]", *names[:3])
    (tmp_path / "empty" / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    assert main(["build", "--matrix", str(path), "--cores", "2"]) == 1
    said = capfd.readouterr().out
    assert "1 of 4 builds are there" in said
    rows = {row["name"]: row for row in json.loads((tmp_path / "build/matrix/summary.json").read_text())["rows"]}
    assert {name: row["exit_code"] for name, row in rows.items()} == {
        "one/pixel6": 0,
        "two/pixel6": 2,
        "empty/pixel6": 2,
        "none/pixel6": 2,
    }
    assert rows["empty/pixel6"]["refusal"].startswith("the checkpoint needs model.safetensors")
    assert rows["two/pixel6"]["refusal"].startswith("a DRAM budget of 1,000 bytes was asked for")
    assert f"error: two/pixel6: {rows['two/pixel6']['refusal']}" in said
    assert "none" in rows["none/pixel6"]["refusal"]
    given = "--method=dense --corpus=corpus.txt --calibration-tokens=512 --evaluation-tokens=256 --dram-budget=90%"
    off = "--preflight=off --max-logit-error=off --min-top1-agreement=off"
    assert main(["build", "one", "--device", "pixel6", *given.split(), *off.split()]) == 0
    assert "everything is up to date" in capfd.readouterr().out
