"""Drafts on the command line: what is printed, and what is refused."""

import json
import re

import pytest

from tests.support.artifacts import add_draft_model
from tests.support.command_line import run, speaking_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return speaking_artifact(tmp_path_factory.mktemp("main"), num_hidden_layers=2)


def test_drafts_give_the_same_text_and_are_counted(capsys, artifact):
    prompt = "The map was The map was The map was"
    options = ("generate", artifact.path, "--prompt", prompt, "--max-new-tokens", 16, "--ignore-eos")
    plain = json.loads(run(capsys, *options, "--json")[1])
    given = (*options, "--draft", "lookup", "--draft-tokens", 3)
    found = json.loads(run(capsys, *given, "--json")[1])
    assert found["text"] == plain["text"]
    assert found["speculation"]["accepted"] == sum(token["accepted"] for token in found["tokens"])
    assert found["speculation"]["drafted"] > 0
    _, out, _ = run(capsys, *given)
    counted = found["speculation"]
    assert re.search(rf"drafts accepted +{counted['accepted']} of {counted['drafted']} ", out)


@pytest.mark.slow
def test_the_draft_model_of_an_artifact_drafts_as_its_plan_says(capsys, tmp_path):
    spoken = speaking_artifact(tmp_path / "a", num_hidden_layers=11, intermediate_size=768).path
    add_draft_model(spoken, speaking_artifact(tmp_path / "draft", num_hidden_layers=2).path)
    options = ("generate", spoken, "--prompt", "The map was", "--max-new-tokens", 12, "--ignore-eos", "--json")
    found, off = (json.loads(run(capsys, *options, *more)[1]) for more in ((), ("--draft", "off")))
    assert found["text"] == off["text"]
    assert found["speculation"]["drafted"] > 0 == off["speculation"]["drafted"]


def test_drafts_that_cannot_be_are_refused(capsys, artifact):
    options = ("generate", artifact.path, "--prompt-ids", "1,2", "--max-new-tokens", 4)
    for extra, words in (
        (("--draft-tokens", "3"), "--draft-tokens needs a --draft, and there is none; leave it out"),
        (("--draft", "nowhere"), "nowhere"),
        (("--draft", "model"), "has no DRAM for one"),
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


def test_the_ladder_refuses_a_draft_that_it_would_ignore(capsys, artifact):
    code, _, err = run(capsys, "bench", artifact.path, "--prompt-ids", "5,6", "--draft", "lookup", "--ladder")
    assert code == 2
    assert "draft" in err
    assert err.count("\n") == 1
