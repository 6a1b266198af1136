"""Drafts on the command line: what is printed, and what is refused."""

import json
import re

import numpy as np
import pytest

from coldpress.runtime.cli import generate
from coldpress.runtime.generate.draft_model import DraftModel
from tests.support.command_line import run, speaking_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return speaking_artifact(tmp_path_factory.mktemp("main"), num_hidden_layers=2)


def test_drafts_give_the_same_text_and_are_counted(capsys, artifact):
    options = ("generate", artifact.path, "--prompt", "The map was", "--max-new-tokens", 12, "--ignore-eos")
    plain = json.loads(run(capsys, *options, "--json")[1])
    budget = plain["metrics"]["dram_budget_bytes"]
    for draft in ("lookup", artifact.path):
        given = (*options, "--draft", draft, "--draft-tokens", 3, "--dram-budget", 2 * budget)
        found = json.loads(run(capsys, *given, "--json")[1])
        assert found["text"] == plain["text"]
        assert found["speculation"]["accepted"] == sum(token["accepted"] for token in found["tokens"])
    assert found["speculation"]["acceptance"] == 1  # its own draft
    assert found["speculation"]["drafted"] == found["speculation"]["accepted"] > 0
    assert found["draft"]["dram_used_bytes"] + found["metrics"]["dram_budget_bytes"] == 2 * budget
    assert found["draft"]["reads"] > 0
    _, out, _ = run(capsys, *given)
    assert re.search(r"drafts accepted +8 of 8 \(100 %\)", out)
    assert "DRAM used by the draft" in out


def test_drafts_that_cannot_be_are_refused(capsys, artifact):
    options = ("generate", artifact.path, "--prompt-ids", "1,2", "--max-new-tokens", 4)
    for extra, words in (
        (("--draft", "lookup", "--draft-budget", "1MB"), "there is none; leave it out"),
        (("--draft-budget", "1MB"), "there is none; leave it out"),
        (("--draft-tokens", "3"), "--draft-tokens needs a --draft, and there is none; leave it out"),
        (("--draft", "nowhere"), "nowhere"),
        (("--draft", artifact.path, "--dram-budget", "500KB"), "leaves too little"),
        (("--draft", "lookup", "--draft-tokens", 32), "is 32, expected 1 to 31"),
    ):
        code, out, err = run(capsys, *options, *extra)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1


def test_bench_says_how_many_tokens_a_pass_decodes(capsys, artifact):
    found = {}
    for draft in ("lookup", "off"):
        given = ("bench", artifact.path, "--prompt-ids", "5,6,7,5,6,7", "--tokens", 24, "--runs", 1, "--draft", draft)
        code, out, _ = run(capsys, *given)
        assert code == 0
        (found[draft],) = json.loads(out.splitlines()[-1])["runs"]
    assert found["off"]["tokens_per_pass"] == 1 < found["lookup"]["tokens_per_pass"]


@pytest.mark.parametrize("other", [("--batch", 2), ("--ladder",)])
def test_bench_refuses_a_draft_that_it_would_ignore(capsys, artifact, other):
    code, _, err = run(capsys, "bench", artifact.path, "--prompt-ids", "5,6", "--draft", "lookup", *other)
    assert code == 2
    assert "draft" in err
    assert err.count("\n") == 1


def test_a_draft_keeps_keys_and_values_as_the_run_does(tmp_path, monkeypatch, capsys):
    artifact, opened = speaking_artifact(tmp_path, num_hidden_layers=2, head_dim=32, rotary_dim=32), []
    monkeypatch.setattr(generate, "DraftModel", lambda session, of: opened.append(session) or DraftModel(session, of))
    prompt = ("--prompt", "The map was", "--max-new-tokens", 2)
    run(
        capsys,
        "generate",
        artifact.path,
        *prompt,
        "--draft",
        artifact.path,
        "--dram-budget",
        "4MB",
        "--kv-cache",
        "int8",
    )
    (draft,) = opened
    draft.decoder.begin(8)
    assert draft.decoder._caches[0].keys.dtype == np.uint8
