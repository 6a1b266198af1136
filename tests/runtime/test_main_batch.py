"""Several prompts on the command line, and `bench --batch`: what is printed, and what is refused."""

import json

import pytest

from coldpress.cli.main import main
from tests.support.artifacts import Recipe, build_artifact, change_manifest, small_spec
from tests.support.models import write_tokenizer

PROMPTS = ("The map was", "A boat")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """A ReLU artifact with a tokenizer."""
    spec = small_spec(vocab_size=384, num_hidden_layers=2, bos_token_id=0, eos_token_ids=(1,))
    built = build_artifact(tmp_path_factory.mktemp("main") / "a.coldpress", Recipe(spec=spec))
    (built.path / "tokenizer").mkdir()
    write_tokenizer(built.path / "tokenizer", 384)
    change_manifest(built.path, lambda manifest: None, relist=True)
    return built


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_several_prompts_give_the_texts_of_each_alone(capsys, artifact):
    options = ("generate", artifact.path, "--max-new-tokens", 8, "--ignore-eos", "--temperature", 2)
    alone = [
        json.loads(run(capsys, *options, "--prompt", prompt, "--seed", 3 + at, "--json")[1])
        for at, prompt in enumerate(PROMPTS)
    ]
    both = (*options, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--seed", 3)
    found = json.loads(run(capsys, *both, "--json")[1])
    for one, expected in zip(found["sequences"], alone, strict=True):
        assert {name: one[name] for name in ("prompt_token_ids", "token_ids", "text", "stop")} == {
            name: expected[name] for name in ("prompt_token_ids", "token_ids", "text", "stop")
        }
        assert [token["id"] for token in one["tokens"]] == one["token_ids"]
    assert found["metrics"]["num_tokens"] == 14
    assert found["per_pass"]["seconds"]["median"] > 0
    code, out, err = run(capsys, *both)
    assert (code, err) == (0, "")
    assert out.startswith("[1] The map was")
    assert "\n\n[2] A boat" in out
    assert "7, 2.00 tokens each" in out


def test_a_stop_string_ends_its_sequence_alone(capsys, artifact):
    options = ("generate", artifact.path, "--max-new-tokens", 8, "--ignore-eos", "--json")
    options += ("--prompt", PROMPTS[0], "--prompt", PROMPTS[1])
    whole = json.loads(run(capsys, *options)[1])["sequences"]
    stop = next(piece for at in range(3) if (piece := whole[0]["text"][at : at + 4]) not in whole[1]["text"])
    cut = json.loads(run(capsys, *options, "--stop", stop)[1])["sequences"]
    assert (cut[0]["stop"], cut[0]["text"]) == (stop, whole[0]["text"][: whole[0]["text"].index(stop)])
    assert len(cut[0]["token_ids"]) < 8
    assert (cut[1]["stop"], cut[1]["text"]) == (None, whole[1]["text"])


def test_ids_are_printed_where_there_is_no_tokenizer(capsys, relu_artifact):
    options = ("generate", relu_artifact.path, "--prompt-ids", "3,14", "--prompt-ids", "15", "--max-new-tokens", 2)
    found = json.loads(run(capsys, *options, "--json")[1])["sequences"]
    assert [one["prompt_token_ids"] for one in found] == [[3, 14], [15]]
    assert [one["text"] for one in found] == [None, None]
    lines = run(capsys, *options)[1].splitlines()
    assert lines[0] == f"[1] 3 14 {' '.join(map(str, found[0]['token_ids']))}"
    assert lines[2] == f"[2] 15 {' '.join(map(str, found[1]['token_ids']))}"


def test_bench_measures_a_batch(capsys, artifact):
    options = ("bench", artifact.path, "--tokens", 3, "--runs", 2)
    _, out, _ = run(capsys, *options, "--batch", 3)
    (row,) = json.loads(out.splitlines()[-1])["runs"]
    assert (row["batch"], row["selector"]) == (3, "relu")
    assert row["tokens_per_s"] > 1 / row["per_token"]["seconds"]["p95"]  # a pass gives three
    assert "3 decoded tokens of each of 3 sequences, drawn at temperature 1" in out
    (one,) = json.loads(run(capsys, *options)[1].splitlines()[-1])["runs"]
    assert one["batch"] == 1


def test_batches_that_cannot_be_are_refused(capsys, artifact):
    several = ("generate", artifact.path, "--prompt-ids", "1,2", "--prompt-ids", "3", "--max-new-tokens", 4)
    for command, words in (
        (("generate", artifact.path, *("--prompt-ids", "1") * 33), "33 prompts are to be continued at once"),
        (("bench", artifact.path, "--batch", 33, "--tokens", 1), "33 prompts are to be continued at once"),
        ((*several, "--draft-tokens", 4), "--draft-tokens needs a --draft, and there is none"),
    ):
        code, out, err = run(capsys, *command)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("flags", [("--prompt", "a", "--prompt", "b"), ("--prompt-ids", "1", "--prompt-ids", "1")])
def test_bench_measures_one_prompt_and_says_so(capsys, artifact, flags):
    """The last one used to be taken."""
    code, _, err = run(capsys, "bench", artifact.path, "--tokens", 1, *flags)
    assert code == 2
    assert f"{flags[0]} was given more than once, expected one prompt" in err
