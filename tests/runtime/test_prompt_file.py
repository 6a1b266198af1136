"""`generate --prompts FILE`: a result for each line, in their order; and what is refused."""

import json
import os

import pytest

from coldpress.runtime.cli import generate
from coldpress.runtime.cli.generate import PromptFile
from coldpress.runtime.dram.budget import fixed_bytes
from coldpress.runtime.generate.batch import BatchRoom
from coldpress.runtime.generate.session import Session
from tests.support.artifacts import Recipe, build_artifact
from tests.support.command_line import run, speaking_artifact

PROMPTS = [{"prompt": "The map was"}, {"prompt_ids": [3, 14]}, {"prompt": "A\nboat ü"}, {"prompt_ids": [9]}] * 9


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return speaking_artifact(tmp_path_factory.mktemp("file"), num_hidden_layers=2).path


@pytest.fixture
def options(artifact, tmp_path):
    """A command on a file of 36 prompts with blank lines between them, more than a pass takes."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in PROMPTS))
    return ("generate", artifact, "--prompts", path, "--max-new-tokens", 8)


def kv_tokens(session):
    """Tokens whose keys and values fit what the session's budget has for them and for units."""
    spec, plan = session.decoder.spec, session.plan
    num_bytes = 2 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim * 2  # a key and a value in fp16
    return (plan.dram_budget_bytes - fixed_bytes(session.artifact.manifest, plan) + plan.kv_cache_bytes) // num_bytes


def alone(capsys, artifact, number, *flags):
    """What a prompt gives in a run of its own."""
    ((kind, value),) = PROMPTS[number].items()
    prompt = ("--prompt", value) if kind == "prompt" else ("--prompt-ids", ",".join(map(str, value)))
    _, out, _ = run(capsys, "generate", artifact, *prompt, "--max-new-tokens", 8, "--json", *flags)
    found = json.loads(out)
    return {name: found[name] for name in ("prompt_token_ids", "token_ids", "text", "stop")}


@pytest.mark.slow
def test_each_line_has_what_it_gives_alone(capsys, artifact, options):
    code, out, err = run(capsys, *options, "--temperature", 2, "--seed", 5)
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [one["prompt_token_ids"] for one in found[:2]] == [found[4]["prompt_token_ids"], [3, 14]]
    assert len(found) == len(PROMPTS)
    for number in (0, 1, 2, 3, 31, 32, 35):
        assert found[number] == alone(capsys, artifact, number, "--temperature", 2, "--seed", 5 + number)
    assert "decoded tokens" in err
    assert run(capsys, *options, "--temperature", 2, "--seed", 5, "--json") == (0, out, "")


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_how_many_go_on_at_once_changes_no_text(capsys, options, batch):
    _, expected, _ = run(capsys, *options, "--json")
    stop = json.loads(expected.splitlines()[0])["text"][2:4]
    _, expected, _ = run(capsys, *options, "--json", "--stop", stop)
    assert json.loads(expected.splitlines()[0])["stop"] == stop
    assert run(capsys, *options, "--json", "--stop", stop, "--batch", batch) == (0, expected, "")


@pytest.mark.slow
def test_a_budget_that_holds_few_kv_caches_has_fewer_at_once(capsys, options, artifact):
    _, expected, _ = run(capsys, *options, "--json")
    budget = Session(artifact).plan.dram_budget_bytes - 40_000  # of 49,152 for units
    code, out, err = run(capsys, *options, "--dram-budget", budget)
    assert (code, out) == (0, expected)
    assert "DRAM used, of the budget" in err
    options[3].write_text(json.dumps({"prompt_ids": [1] * 4}) + '\n{"prompt_ids": [2]}' * 40)
    for change, most in ((-40_000, 32), (0, 32), (10**6, 32), (10**6, 5)):
        session = Session(artifact, dram_budget_bytes=budget + 40_000 + change)
        room = PromptFile(options[3], session, None, 8).room(most)
        tokens = kv_tokens(session)
        assert room == BatchRoom(room.sequences, 12, 12 + 9 * (room.sequences - 1))
        assert room.sequences == min(most, 1 + (tokens - 12) // 9)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": 3}', """line 2: it is {'prompt': 3}, expected {"prompt": "text"} or {"prompt_ids": [1, 2, 3]}"""),
        ('{"prompt": "a", "prompt_ids": [1]}', "line 2: it is {'prompt': 'a', 'prompt_ids': [1]}, expected"),
        ('{"prompt_ids": [1, true]}', "line 2: it is {'prompt_ids': [1, True]}, expected"),
        ('{"prompt_ids": []}', "line 2: it is a prompt without tokens, expected at least one"),
        ('{"prompt_ids": [384]}', "line 2: token id 384 is outside the vocabulary, expected 0 to 383"),
        ('{"prompt_ids": [-1]}', "line 2: token id -1 is outside the vocabulary"),
        ('{"prompt_ids": [9007199254740991]}', "line 2: token id 9007199254740991 is outside the vocabulary"),
        ('{"prompt_ids": [99999999999999999999]}', "line 2: it is text with the integer '99999999999999999999'"),
        (json.dumps({"prompt_ids": [1] * 25}), "line 2: the prompt and the new tokens make 33 tokens, the plan"),
        ('{"prompt": "a"', "line 2: it is not JSON (Expecting ',' delimiter"),
        ("The map was", "line 2: it is not JSON"),
        ('{"prompt": "a", "prompt": "b"}', "line 2: "),
        ('{"prompt": "\\ud800"}', "line 2: "),
        ('"a"', "line 2: it is 'a', expected"),
        ("\udcff", "line 2: it is not JSON"),
        ("[" * 100, "line 2: it is nested"),
        ('{"prompt": "' + "a" * 200 + '"}', "line 2: it is 101 bytes long, expected at most"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_before_anything_runs(capsys, options, monkeypatch, line, words):
    monkeypatch.setattr(generate, "MAX_LINE_BYTES", 100 if "a" * 200 in line else 10_000)
    path = options[3]
    path.write_bytes(b'{"prompt_ids": [1]}\n' + os.fsencode(line))
    code, out, err = run(capsys, *options)
    assert (code, out) == (2, "")
    assert f"error: {path}, {words}" in err
    assert err.count("\n") == 1


def test_what_goes_with_no_file_or_no_prompts_is_refused(capsys, options, relu_artifact, tmp_path):
    path, dip_ca = options[3], build_artifact(tmp_path / "dip_ca", Recipe(method="dip_ca")).path
    cases = [
        ((*options, "--draft-tokens", 3), "--draft-tokens needs a --draft, and there is none"),
        ((*options, "--batch", 33), "--batch is 33, expected 1 to 32"),
        (("generate", relu_artifact.path, "--prompts", path), "text needs a tokenizer, and the artifact has none"),
        (("generate", relu_artifact.path, "--prompt-ids", 1, "--batch", 3), "there is none; leave it out"),
        ((*options[:3], tmp_path, "--json"), "is not a regular file, expected prompts as JSON lines"),
    ]
    for command, words in cases:
        code, out, err = run(capsys, *command)
        assert (code, out) == (2, "")
        assert words in err
    path.write_text("\n \n")
    assert "has no prompts, expected JSON lines such as" in run(capsys, *options)[2]
    path.write_text('{"prompt_ids": [1, 2]}\n{"prompt_ids": [3]}')
    command = ("generate", dip_ca, "--prompts", path, "--max-new-tokens", 2)
    assert "uses what is in DRAM" in run(capsys, *command)[2]
    assert run(capsys, *command, "--batch", 1)[0] == 0
