"""A sweep gives what each simulation of `coldpress simulate` gives alone."""

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.shared import sweep
from coldpress.cli.main import main
from coldpress.runtime.artifact.reader import open_artifact
from tests.support.command_line import run, speaking_artifact

DEVICES, CACHES = ("oneplus12", "pixel6"), ("belady", "lru")


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> tuple[Path, Path]:
    """An artifact, and a trace of it."""
    artifact = speaking_artifact(tmp_path_factory.mktemp("sweep"), num_hidden_layers=11).path
    trace = artifact.parent / "run.trace"
    told = ("--prompt-ids", "3,4", "--max-new-tokens", "24", "--ignore-eos", "--trace", str(trace))
    assert main(["generate", str(artifact), *told]) == 0
    return artifact, trace


def swept(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Runs a sweep; its exit code, standard output and standard error."""
    code = sweep.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_each_row_is_what_its_settings_give_alone(capsys, traced):
    artifact, trace = traced
    most = open_artifact(artifact).manifest.plans[0].dram_budget_bytes
    budgets = (str(most - 200_000), str(most))
    options = ("simulate", artifact, "--trace", trace, "--json")
    told = ("--device", ",".join(DEVICES), "--dram-budget", ",".join(budgets), "--cache", ",".join(CACHES))
    code, out, err = swept(capsys, artifact, "--trace", trace, "--json", *told)
    assert (code, err) == (0, "")
    rows = json.loads(out)["runs"]
    expected = list(itertools.product(DEVICES, map(int, budgets), CACHES))
    assert [(row["device"], row["dram_budget_bytes"], row["cache"]) for row in rows] == expected
    for row in rows:
        own = ("--device", row["device"], "--dram-budget", row["dram_budget_bytes"], "--cache", row["cache"])
        alone = json.loads(run(capsys, *options, *own)[1])["metrics"]
        assert row["tokens_per_s"] == alone["num_tokens"] / alone["modelled_s"]
        assert row["reads_per_token"] == alone["reads"] / alone["num_tokens"]
        assert row["read_bytes_per_token"] == alone["read_bytes"] / alone["num_tokens"]
        assert row["hit_rate"] == alone["hits"] / (alone["hits"] + alone["misses"])
    assert len({row["hit_rate"] for row in rows}) > len(budgets), "caches differ"


@pytest.mark.slow
def test_a_budget_that_fits_nothing_is_a_row_with_its_reason(capsys, traced):
    artifact, trace = traced
    most = open_artifact(artifact).manifest.plans[0].dram_budget_bytes
    out = swept(capsys, artifact, "--trace", trace, "--dram-budget", f"1000,{most}")[1]
    lines = out.splitlines()
    assert "does not fit" in lines[1]
    assert "does not fit" not in lines[2]
    assert "before any unit is cached" in lines[-1]
    code, _, err = swept(capsys, artifact, "--trace", trace, "--dram-budget", "1000,2000")
    assert code == 2
    assert err.startswith("error: nothing fits")


@pytest.mark.slow
def test_every_device_is_a_row(capsys, traced):
    artifact, trace = traced
    rows = json.loads(swept(capsys, artifact, "--trace", trace, "--device", "all", "--json")[1])["runs"]
    assert {"pixel6", "oneplus12", "iphone-a18"} <= {row["device"] for row in rows}


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (("--device", "pixel6,oneplus21"), "unknown device 'oneplus21'. Did you mean 'oneplus12'?"),
        (("--cache", "lru,mru"), "unknown cache 'mru'"),
        (("--dram-budget", "1MB,much"), "much"),
        (("--device", ","), "--device names no device"),
    ],
)
def test_a_mistake_in_a_list_is_one_sentence(capsys, traced, told, sentence):
    artifact, trace = traced
    code, out, err = swept(capsys, artifact, "--trace", trace, *told)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1
