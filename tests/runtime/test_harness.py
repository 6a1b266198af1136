"""An artifact in lm-evaluation-harness scores what the harness's own model of the same weights scores."""

from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from coldpress.runtime.cli.harness import ArtifactModel, main
from coldpress.runtime.generate.session import Session
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ArtifactError, ColdpressError
from tests.support.local_task import NAME, TASK, endings_task
from tests.support.records import Build
from tests.support.tiny import tiny_spec

PROMPTS = ("w17 w3 w200 w8", "w301 w9", "w44 w45 w46")
ENDINGS = (" w5 w19", " w9 w11 w300 w2", " w77")


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    made = Build(tmp_path_factory.mktemp("harness"), method="dense", format_name="fp16", spec=tiny_spec())
    made.package()
    return made


@pytest.fixture(scope="module")
def source(build):
    folder = Path(build.model.tensors["norm.weight"].file).resolve().parent
    tokenizer = AutoTokenizer.from_pretrained(
        folder, eos_token="w0"
    )  # here the artifact's first token, with which texts begin
    model: Any = HFLM  # whose decorators hide its arguments from a type checker
    return model(pretrained=str(folder), tokenizer=tokenizer, device="cpu", dtype="float32", batch_size=1)


@pytest.fixture(scope="module")
def model(build):
    return ArtifactModel(build.artifact, batch_size=1, device="cpu")


def requests(kind, *arguments):
    return [Instance(kind, {}, pair, index) for index, pair in enumerate(arguments)]


def test_likelihoods_are_those_of_the_source(model, source):
    asked = requests("loglikelihood", *[(prompt, ending) for prompt in PROMPTS for ending in ENDINGS])
    found, expected = (each.loglikelihood(asked, disable_tqdm=True) for each in (model, source))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=3e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_what_greedy_decoding_gives_is_greedy(model):
    prompt_ids = model.tok_encode(PROMPTS[0])
    new_ids = Session(model._session.artifact.path).generate(prompt_ids, 4, ignore_eos=True).token_ids
    other = (*new_ids[:3], (new_ids[3] + 1) % 384)
    found = model._loglikelihood_tokens([(None, prompt_ids, list(ids)) for ids in (new_ids, other)])
    assert [greedy for _, greedy in found] == [True, False]
    assert found[0][0] > found[1][0]


def test_a_whole_text_is_scored_in_windows(model, source):
    """Longer than the context of 64."""
    text = " ".join(f"{prompt} {ending}" for prompt in PROMPTS for ending in ENDINGS) + " w6" * 20
    source._max_length = model.max_length - 1
    asked = requests("loglikelihood_rolling", (text,))
    found, expected = (each.loglikelihood_rolling(asked, disable_tqdm=True) for each in (model, source))
    assert len(model.tok_encode(text)) > model.max_length
    assert found == pytest.approx(expected, rel=3e-3)


def test_generation_stops_at_a_string(model):
    prompt_ids = model.tok_encode(PROMPTS[0])
    codec = TextCodec(model._session.artifact)
    ids = Session(model._session.artifact.path).generate(prompt_ids, 12).token_ids
    eos = model._session.artifact.manifest.model.eos_token_ids
    text = codec.continuation(prompt_ids, [token for token in ids if token not in eos])
    asked = [
        (PROMPTS[0], {"until": [], "max_gen_toks": 12}),
        (PROMPTS[0], {"until": [text[3:5], "\0"], "max_gen_toks": 12}),
    ]
    assert model.generate_until(requests("generate_until", *asked)) == [text, text[: text.index(text[3:5])]]


@pytest.mark.slow
def test_a_local_task_has_the_source_s_accuracy(model, source, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = endings_task(tmp_path, PROMPTS * 2, ENDINGS)
    evaluated: Any = lm_eval.simple_evaluate
    found, expected = (
        evaluated(model=each, tasks=[NAME], task_manager=tasks, bootstrap_iters=0) for each in (model, source)
    )
    chosen = [sample["filtered_resps"] for sample in found["samples"][NAME]]
    assert len(chosen) == len(PROMPTS * 2)
    for metric in ("acc,none", "acc_norm,none"):
        assert found["results"][NAME][metric] == expected["results"][NAME][metric]


def test_the_prompt_goes_through_the_selector_where_that_is_said(tmp_path):
    build = Build(tmp_path, method="topk", format_name="fp16", spec=tiny_spec())
    build.package()
    asked = requests("loglikelihood", (" ".join(PROMPTS), ENDINGS[1]))
    dense, sparse = (
        ArtifactModel(build.artifact, sparse_prompt=sparse_prompt).loglikelihood(asked, disable_tqdm=True)[0][0]
        for sparse_prompt in (False, True)
    )
    assert dense != sparse


def test_what_cannot_be_scored_is_refused(model):
    with pytest.raises(ColdpressError, match=r"scores 64 tokens after 1, .* larger context_length"):
        model._loglikelihood_tokens([(None, [1], [2] * 64)])
    with pytest.raises(ColdpressError, match="asks for 64 new tokens, the artifact's context has 64"):
        model.generate_until(requests("generate_until", ("w3", {"until": ["x"], "max_gen_toks": 64})))
    with pytest.raises(ColdpressError, match="model_args has budget, expected artifact, dram_budget"):
        ArtifactModel(model._session.artifact.path, budget="1GB")
    with pytest.raises(ArtifactError):
        ArtifactModel("/nowhere")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"selector": 7}, "model_args has selector=7, expected a name"),
        ({"cache": 1.5}, "model_args has cache=1.5, expected a name"),
        ({"sparse_prompt": "maybe"}, "model_args has sparse_prompt='maybe', expected true or false"),
        ({"sparse_prompt": 2}, "model_args has sparse_prompt=2, expected true or false"),
    ],
)
def test_arguments_of_another_type_are_refused(model, changes, sentence):
    with pytest.raises(ColdpressError, match=sentence):
        ArtifactModel(model._session.artifact.path, **changes)


@pytest.mark.parametrize("said", ["false", "False", False])
def test_false_is_false_however_it_is_written(model, said):
    assert not ArtifactModel(model._session.artifact.path, sparse_prompt=said)._sparse_prompt


def test_a_request_without_any_token_is_refused(model):
    with pytest.raises(ColdpressError, match="scores the ending '', which has no tokens, after an empty context"):
        model.loglikelihood(requests("loglikelihood", ("", "")), disable_tqdm=True)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"until": [1]}, r"a task's `until` has 1, expected texts"),
        ({"until": ["x"], "temperature": [1]}, r"a task's generation_kwargs are .*temperature"),
        ({"until": ["x"], "max_gen_toks": "many"}, r"a task's generation_kwargs are .*many"),
    ],
)
def test_generation_kwargs_of_another_type_are_refused(model, kwargs, sentence):
    with pytest.raises(ColdpressError, match=sentence):
        model.generate_until(requests("generate_until", ("w3", kwargs)))


def test_a_data_set_out_of_reach_is_one_sentence_that_says_what_to_do(monkeypatch, capsys):
    def unreachable():
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub\n(offline)")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", unreachable)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: the harness could not load a task's data (Couldn't reach 'baber/piqa'")
    assert "dataset_path: json" in sentence
    assert "--include_path" in sentence


@pytest.mark.parametrize(
    ("task", "sentence"),
    [(NAME, "error: /nowhere: the artifact is missing"), ("other", "error: Tasks not found: other")],
)
@pytest.mark.slow
def test_the_command_line_refuses_in_a_sentence(tmp_path, monkeypatch, capsys, task, sentence):
    (tmp_path / f"{NAME}.yaml").write_text(TASK % "none.jsonl")
    arguments = f"run --model coldpress --model_args artifact=/nowhere --tasks {task} --include_path {tmp_path}"
    monkeypatch.setattr("sys.argv", ["harness", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)
