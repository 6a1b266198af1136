"""`coldpress build --matrix`: each job once, a second run does nothing, and a worsened build fails the gate."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from coldpress.cli import matrix as gate
from coldpress.cli.main import main
from coldpress.cli.matrix import BuildResult, MatrixResults, junit, lock_file, read_lock
from coldpress.compiler.workflow.matrix import cells, read_matrix
from coldpress.schemas.errors import ColdpressError
from tests.support.models import write_corpus, write_model

FIGURES = {"ppl_ratio": 1.01, "modelled_tokens_per_s": 50.0, "artifact_bytes": 1e6}


def result(name: str = "tiny/pixel6", exit_code: int = 0, **changes: object) -> BuildResult:
    values = {"manifest_sha256": "a" * 64, "inputs": {"weights": "b" * 64}, "figures": FIGURES} | changes
    return BuildResult(name=name, exit_code=exit_code, seconds=1.0, **values)


def results(*rows: BuildResult, compiler: str = "0.1.0 abc", numpy: str = "2.4") -> MatrixResults:
    return MatrixResults(compiler=compiler, versions={"numpy": numpy}, rows=rows)


ACCEPTED = gate.accepted_of(results(result()))


def verdicts(now: MatrixResults) -> dict[str, str]:
    return {one.figure: one.verdict for one in gate.compare(now, ACCEPTED)}


def test_equal_builds_pass_whatever_time_they_take() -> None:
    assert set(verdicts(results(result().model_copy(update={"seconds": 99.0}))).values()) == {"equal"}
    assert gate.markdown(gate.compare(results(result()), ACCEPTED)) == "All builds are as they were accepted.\n"


@pytest.mark.parametrize(
    ("figure", "value", "verdict"),
    [
        ("ppl_ratio", 1.013, "worse"),
        ("ppl_ratio", 1.0115, "equal"),
        ("ppl_ratio", 1.0, "better"),
        ("modelled_tokens_per_s", 48.0, "worse"),
        ("modelled_tokens_per_s", 60.0, "better"),
        ("artifact_bytes", 1.02e6, "worse"),
        ("artifact_bytes", 0.9e6, "better"),
    ],
)
def test_a_figure_is_worse_in_one_direction_and_beyond_its_tolerance(figure: str, value: float, verdict: str) -> None:
    assert verdicts(results(result(figures=FIGURES | {figure: value})))[figure] == verdict


def test_errors_of_the_figures_count_as_noise() -> None:
    noisy = result(figures=FIGURES | {"ppl_ratio": 1.013}, errors={"ppl_ratio": 0.01})
    assert verdicts(results(noisy))["ppl_ratio"] == "equal"


def test_other_bytes_of_the_same_inputs_are_worse_unless_something_explains_them() -> None:
    other = result(manifest_sha256="c" * 64)
    (one,) = [one for one in gate.compare(results(other), ACCEPTED) if one.figure == "bytes"]
    assert (one.verdict, one.why) == ("worse", gate.SAME)
    for now, why in (
        (results(other, compiler="0.1.0 def"), "compiler 0.1.0 abc became 0.1.0 def"),
        (results(other, numpy="2.5"), "numpy 2.4 became 2.5"),
        (results(result(manifest_sha256="c" * 64, inputs={"weights": "d" * 64})), "another weights"),
    ):
        (one,) = [one for one in gate.compare(now, ACCEPTED) if one.figure == "bytes"]
        assert (one.verdict, one.why) == ("equal", why)


def test_a_build_that_fails_is_worse_and_a_new_one_is_not() -> None:
    failed = result(exit_code=2, refusal="the disk is full")
    now = results(failed, result("tiny/oneplus12"))
    found = gate.compare(now, ACCEPTED)
    assert [(one.name, one.verdict) for one in found] == [("tiny/pixel6", "worse"), ("tiny/oneplus12", "new")]
    assert gate.worse(found) == {"tiny/pixel6": "build was built, now the disk is full"}
    assert [one.verdict for one in gate.compare(results(), ACCEPTED)] == ["gone"]
    table = gate.markdown(found).splitlines()
    assert table[2].startswith("| worse | tiny/pixel6 | build | built | the disk is full |")
    suite = ElementTree.fromstring(junit(now, gate.worse(found)))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [case.find("failure") is not None for case in suite] == [True, False]


def written(folder: Path, text: str) -> Path:
    path = folder / "builds.yaml"
    path.write_text(text)
    return path


def test_a_matrix_is_models_times_devices_times_floors(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    path = written(
        tmp_path,
        """
models:
  - model: tiny
  - {model: owner/name, revision: abc, dram_budget: 70%}
devices: [pixel6, build/host.yaml]
floors: [1.02, 1.05]
keys: {dram_budget: 50%, distill: true}
""",
    )
    found = cells(read_matrix(path), tmp_path)
    assert list(found)[:5] == [
        "tiny/pixel6/1.02",
        "tiny/pixel6/1.05",
        "tiny/host/1.02",
        "tiny/host/1.05",
        "name/pixel6/1.02",
    ]
    assert found["tiny/pixel6/1.02"] == {
        "model": str(tmp_path / "tiny"),
        "device": "pixel6",
        "dram_budget": "50%",
        "distill": "true",
        "max_ppl_ratio": "1.02",
        "label": "ppl1.02",
    }
    assert found["name/host/1.05"]["dram_budget"] == "70%"
    assert found["name/host/1.05"]["revision"] == "abc"


def test_a_profile_is_taken_although_a_folder_has_its_name(tmp_path: Path) -> None:
    """As in a checkout, whose folder `demo` holds the model's recipe."""
    (tmp_path / "relu-demo").mkdir()
    path = written(tmp_path, "models: [{model: relu-demo}]\ndevices: [pixel6]\n")
    (config,) = cells(read_matrix(path), tmp_path).values()
    assert config["model"] == "relu-demo"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: [{model: a}]", "devices: Field required"),
        ("models: []\ndevices: [pixel6]", "models: Tuple should have at least 1 item"),
        ("models: [{model: a}]\ndevices: [pixel6]\nfloor: [1.0]", "floor: Extra inputs"),
        ("models: [", "is no YAML"),
    ],
)
def test_a_matrix_that_lacks_something_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ColdpressError, match=words):
        read_matrix(written(tmp_path, text))


def test_two_builds_of_one_name_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "models: [{model: a/x}, {model: b/x}]\ndevices: [pixel6]")
    with pytest.raises(ColdpressError, match="two builds of the matrix are x/pixel6"):
        cells(read_matrix(path), tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_jobs")
def test_each_job_runs_once_and_a_worsened_build_fails_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "tiny", num_hidden_layers=2, relu=True)
    write_corpus(tmp_path / "corpus.txt", 200)
    path = written(
        tmp_path,
        """
models: [{model: tiny}]
devices: [pixel6, oneplus12]
keys:
  {method: dense, corpus: corpus.txt, calibration_tokens: 512, evaluation_tokens: 256, dram_budget: 90%,
   preflight: "off", max_logit_error: "off", min_top1_agreement: "off"}
""",
    )
    monkeypatch.chdir(tmp_path)
    told = ["build", "--matrix", str(path), "--accepted", "accepted.json", "--cores", "2"]
    assert main([*told, "--accept"]) == 0
    first = capfd.readouterr().out
    assert first.count("tiny.calibrate ") == 1, "the second device shares it"
    assert first.count(".package ") == 2
    assert main(told) == 0
    second = capfd.readouterr().out
    assert ".calibrate " not in second
    assert "All builds are as they were accepted." in second
    known = json.loads((tmp_path / "accepted.json").read_text())
    known["builds"]["tiny/pixel6"]["figures"]["modelled_tokens_per_s"] *= 2
    (tmp_path / "accepted.json").write_text(json.dumps(known))
    assert main(told) == 1
    said = capfd.readouterr().out
    assert "| worse | tiny/pixel6 | modelled_tokens_per_s |" in said
    folder = tmp_path / "build" / "matrix"
    suite = ElementTree.parse(folder / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert "tiny/oneplus12" in (folder / "index.html").read_text()
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    assert all((folder / row["report"]).is_file() for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_jobs")
def test_a_model_whose_inputs_changed_is_not_built_until_the_lock_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        write_model(tmp_path / name, num_hidden_layers=2, relu=True)
    write_corpus(tmp_path / "corpus.txt", 200)
    path = written(
        tmp_path,
        """
models: [{model: one}, {model: two}]
devices: [pixel6]
keys:
  {method: dense, corpus: corpus.txt, calibration_tokens: 512, evaluation_tokens: 256, dram_budget: 90%,
   preflight: "off", max_logit_error: "off", min_top1_agreement: "off"}
""",
    )
    monkeypatch.chdir(tmp_path)
    told = ["build", "--matrix", str(path), "--cores", "2"]
    assert main(told) == 0
    lock = json.loads((tmp_path / "builds.lock").read_text())["models"]
    assert list(lock) == ["one", "two"]
    assert lock["one"] == lock["two"], "models of the same weights and text"
    before = (tmp_path / "builds.lock").read_bytes()
    write_model(tmp_path / "two", num_hidden_layers=3, relu=True)
    capfd.readouterr()
    assert main(told) == 1
    said = capfd.readouterr().out
    words = "two/pixel6: two differs from builds.lock: weights [0-9a-f]{12} became [0-9a-f]{12}; restore it"
    assert re.search(f"error: {words}", said)
    assert ".calibrate " not in said
    assert (tmp_path / "builds.lock").read_bytes() == before
    rows = json.loads((tmp_path / "build/matrix/summary.json").read_text())["rows"]
    assert [row["exit_code"] for row in rows] == [0, 2]
    assert main([*told, "--update-lock"]) == 0
    after = json.loads((tmp_path / "builds.lock").read_text())["models"]
    assert after["one"] == lock["one"]
    assert after["two"]["weights_sha256"] != lock["two"]["weights_sha256"]


def test_a_broken_lock_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "builds.lock").write_text("{")
    with pytest.raises(ColdpressError, match=r"builds\.lock cannot be read as a lock file; .* --update-lock"):
        read_lock(lock_file(tmp_path / "builds.yaml"))
    assert read_lock(tmp_path / "none.lock") is None
