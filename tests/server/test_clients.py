"""The vendors' own clients, and an evaluation harness, against the server."""

import subprocess
import sys
from functools import partial
from typing import Any

import anthropic
import lm_eval
import numpy as np
import openai
import pytest
import yaml
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from coldpress.runtime.cli.harness import ArtifactModel
from coldpress.runtime.generate.session import Session
from tests.support.command_line import speaking_artifact
from tests.support.local_task import NAME, endings_task
from tests.support.serving import serving_here

CHAT = [{"role": "user", "content": "Where is the map?"}]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat(client, model):
    expected = model.chat([SYSTEM, *CHAT], 16)
    fields = {"model": "tiny", "messages": [SYSTEM, *CHAT], "max_completion_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 16
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].usage == whole.usage
    with client.chat.completions.stream(**fields) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == expected.text


def test_openai_completions(client, model):
    expected = model.generate("The map was", 16)
    fields = {"model": "tiny", "prompt": "The map was", "max_tokens": 16, "temperature": 0}
    assert client.completions.create(**fields).choices[0].text == expected.text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True)]
    assert "".join(pieces) == expected.text
    scored = client.completions.create(**fields | {"max_tokens": 0}, echo=True, logprobs=1)
    assert len(scored.choices[0].logprobs.token_logprobs) == len(expected.prompt_token_ids)
    more = {"min_p": 0.01, "top_k": 9}
    drawn = client.completions.create(**fields | {"temperature": 4}, n=2, seed=3, extra_body=more)
    assert [choice.text for choice in drawn.choices] == [
        model.generate("The map was", 16, temperature=4, seed=seed, **more).text for seed in (3, 4)
    ]


def test_openai_responses(client, model):
    expected = model.chat([SYSTEM, *CHAT], 16)
    fields = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**fields, input="Where is the map?")
    assert (whole.output_text, whole.status) == (expected.text, "incomplete")
    assert whole.usage.output_tokens == 16
    events = list(client.responses.create(**fields, input=CHAT, stream=True))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[-1].response.output_text == expected.text
    # the answer goes back with the next question, as its record has it
    chat = [*CHAT, whole.output[0].model_dump(exclude_none=True), {"role": "user", "content": "And the compass?"}]
    told = [
        SYSTEM,
        *CHAT,
        {"role": "assistant", "content": expected.text},
        {"role": "user", "content": "And the compass?"},
    ]
    assert client.responses.create(**fields, input=chat).output_text == model.chat(told, 16).text


def test_openai_errors_models_and_leaving_early(client, server):
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "coldpress"
    with pytest.raises(openai.BadRequestError, match="'presence_penalty' is 1"):
        client.chat.completions.create(model="tiny", messages=CHAT, presence_penalty=1)
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.chat.completions.create(model="other", messages=CHAT)
    with client.completions.create(model="tiny", prompt="Once", max_tokens=480, stream=True) as stream:
        next(iter(stream))
    server.wait_for(lambda now: now["running"] == 0)


def test_anthropic_messages(claude, model):
    expected = model.chat([SYSTEM, *CHAT], 16)
    greedy = {"extra_body": {"temperature": 0}}  # the client has no such argument any more
    fields = {"model": "tiny", "system": "Be brief.", "messages": CHAT, "max_tokens": 16, **greedy}
    whole = claude.messages.create(**fields)
    assert (whole.content[0].text, whole.stop_reason) == (expected.text, "max_tokens")
    assert whole.usage.input_tokens == len(expected.prompt_token_ids)
    with claude.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == expected.text
        assert stream.get_final_message().usage.output_tokens == 16
    counted = claude.messages.count_tokens(model="tiny", system="Be brief.", messages=CHAT)
    assert counted.input_tokens == len(expected.prompt_token_ids)
    with pytest.raises(anthropic.BadRequestError, match="'tools' is"):
        claude.messages.create(**fields, tools=[{"name": "x", "input_schema": {"type": "object"}}])


def test_langchain_chats_and_completes(server, model):
    fields = {"model": "tiny", "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    expected = model.chat([SYSTEM, *CHAT], 16)
    chat: Any = ChatOpenAI(**fields, temperature=0, max_completion_tokens=16)
    messages = [SystemMessage("Be brief."), HumanMessage(CHAT[0]["content"])]
    whole = chat.invoke(messages)
    assert (whole.content, whole.response_metadata["finish_reason"]) == (expected.text, "length")
    assert whole.usage_metadata["input_tokens"] == len(expected.prompt_token_ids)
    assert "".join(chunk.content for chunk in chat.stream(messages)) == expected.text
    newer: Any = ChatOpenAI(**fields, temperature=0, max_completion_tokens=16, use_responses_api=True)
    assert newer.invoke(messages).text == expected.text
    completes: Any = OpenAI(**fields, temperature=0, max_tokens=16)
    expected = model.generate("The map was", 16)
    assert completes.invoke("The map was") == expected.text
    assert "".join(completes.stream("The map was")) == expected.text
    assert completes.batch(["The map was", "Once"]) == [expected.text, model.generate("Once", 16).text]
    for each in (chat, newer):
        each.root_client.close()
    completes.client._client.close()


@pytest.mark.slow
def test_the_command_llm_chats_and_completes(server, model, tmp_path):
    of_server = {"api_base": f"{server.url}/v1", "model_name": "tiny"}
    models = [{"model_id": "chat", **of_server}, {"model_id": "text", **of_server, "completion": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))

    def says(*words: str) -> str:
        command = [
            sys.executable,
            "-m",
            "llm",
            *words,
            "--key",
            "none",
            "-o",
            "temperature",
            "0",
            "-o",
            "max_tokens",
            "16",
        ]
        home = {"LLM_USER_PATH": str(tmp_path), "PATH": ""}
        done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")

    question = CHAT[0]["content"]
    for stream in ([], ["--no-stream"]):
        assert says(question, "-m", "chat", "-s", "Be brief.", *stream) == model.chat([SYSTEM, *CHAT], 16).text
        assert says("The map was", "-m", "text", *stream) == model.generate("The map was", 16).text


def test_both_clients_send_the_key(artifact):
    with serving_here(artifact.path, key="sesame") as server:
        for key, passes in (("sesame", True), ("sesam", False)):
            with (
                openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client,
                anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as claude,
            ):
                if passes:
                    assert client.completions.create(model="tiny", prompt="Once", max_tokens=1).choices
                    assert claude.messages.create(model="tiny", messages=CHAT, max_tokens=1).content
                    continue
                with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
                    client.models.list()
                with pytest.raises(anthropic.AuthenticationError, match="the key is missing or wrong"):
                    claude.messages.create(model="tiny", messages=CHAT, max_tokens=1)


def test_the_evaluation_harness_scores_and_generates(artifact, server, model):
    """lm-eval's `local-completions`, unmodified: sums of log-probabilities, whether greedy, and texts."""
    url, tokenizer = f"{server.url}/v1/completions", str(artifact.path / "tokenizer")
    settings = {"base_url": url, "model": "tiny", "tokenizer": tokenizer, "tokenizer_backend": "huggingface"}
    harness = LocalCompletionsAPI(**settings)
    greedy = model.generate([9, 2, 6], 3).token_ids
    requests = [(("a", "b"), [3, 14, 15], [92, 65]), (("c", "d"), [9, 2, 6], list(greedy)), (("e", "f"), [35], [8, 97])]
    found = harness._loglikelihood_tokens(requests, disable_tqdm=True)
    session = Session(artifact.path, dram_budget_bytes=10**9)
    for (_, context, ending), (total, is_greedy) in zip(requests, found, strict=True):
        ids = [*context, *ending]
        session.decoder.begin(len(ids))
        logits = session.decoder.prefill(np.array(ids)).astype(np.float64)[len(context) - 1 : -1]
        scores = logits - np.log(np.exp(logits).sum(axis=1))[:, None]
        assert total == pytest.approx(scores[np.arange(len(ending)), ending].sum(), abs=1e-3)
        assert is_greedy == bool((logits.argmax(axis=1) == ending).all())
    assert [is_greedy for _, is_greedy in found] == [False, True, False]
    asked = {"until": ["\n\n"], "max_gen_toks": 9, "temperature": 0.0, "do_sample": False}
    instances = [Instance("generate_until", {}, (prompt, dict(asked)), 0) for prompt in ("The map was", "Once")]
    expected = [model.generate(prompt, 9, stop=["\n\n"]).text for prompt in ("The map was", "Once")]
    harness = LocalCompletionsAPI(**settings, tokenized_requests=False)
    assert harness.generate_until(instances, disable_tqdm=True) == expected


@pytest.mark.slow
def test_a_task_has_the_same_scores_through_the_server_and_through_the_harness_model(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # the harness's tokenizer of this class adds no first token, whatever its settings say
    path = speaking_artifact(tmp_path, add_bos_token=False).path
    tasks = endings_task(
        tmp_path, ("The map was", "Once upon a time", "Where is"), (" here", " the compass", " a boat")
    )
    evaluated: Any = partial(lm_eval.simple_evaluate, tasks=[NAME], task_manager=tasks, bootstrap_iters=0)
    with serving_here(path, dram_budget_bytes=10**9) as server:
        of_server = {"base_url": f"{server.url}/v1/completions", "model": "tiny"}
        found = evaluated(model=LocalCompletionsAPI(**of_server, tokenizer=str(path / "tokenizer")))
    expected = evaluated(model=ArtifactModel(path, dram_budget="1GB"))
    scores = [
        [(float(score), is_greedy == "True") for sample in each["samples"][NAME] for score, is_greedy in _of(sample)]
        for each in (found, expected)
    ]
    assert [score for score, _ in scores[0]] == pytest.approx([score for score, _ in scores[1]], abs=1e-3)
    assert [is_greedy for _, is_greedy in scores[0]] == [is_greedy for _, is_greedy in scores[1]]
    assert len(scores[0]) == 9
    for metric in ("acc,none", "acc_norm,none"):
        assert found["results"][NAME][metric] == expected["results"][NAME][metric]


def _of(sample: dict[str, Any]) -> list[tuple[str, str]]:
    return [(str(score), str(is_greedy)) for score, is_greedy in sample["filtered_resps"]]
