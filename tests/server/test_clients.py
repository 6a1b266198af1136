"""The vendors' own clients, and an evaluation harness, against the server."""

import anthropic
import numpy as np
import openai
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from coldpress.runtime.generate.session import Session
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
