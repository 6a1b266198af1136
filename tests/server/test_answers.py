"""What the server answers: the same tokens as the Python interface, in the shapes that clients read."""

import json
import shutil
import time

import numpy as np
import pytest

import coldpress
from coldpress.runtime.generate.session import Session
from tests.support.artifacts import change_manifest
from tests.support.serving import serving_here

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the map?"}]


def texts(answer):
    """The text of each choice of an answer to /v1/completions, whole or streamed."""
    assert answer.status == 200, answer.body
    found = {}
    for part in answer.events or [answer.json]:
        for choice in part["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["The map was", "Once", [3, 14, 15]])
def test_greedy_text_is_the_python_interfaces(server, model, prompt, stream):
    expected = model.generate(prompt, 24).text
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=24, temperature=0, stream=stream)
    assert texts(answer) == [expected]
    assert answer.body.endswith(b"data: [DONE]\n\n") == stream


def test_a_chat_is_the_python_interfaces_whole_and_streamed(server, model):
    expected = model.chat(CHAT, 24)
    whole = server.post("/v1/chat/completions", messages=CHAT, max_tokens=24, temperature=0).json
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert whole["choices"][0]["finish_reason"] == "length"
    usage = {"prompt_tokens": len(expected.prompt_token_ids), "completion_tokens": 24}
    assert whole["usage"] == usage | {"total_tokens": sum(usage.values())}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = server.post("/v1/chat/completions", messages=CHAT, max_tokens=24, temperature=0, **options)
    *events, last = answer.events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == expected.text
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_parts_of_text_and_developers_are_as_one_text_and_system(server):
    parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "the map?"}]
    chat = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    found = [
        server.post("/v1/chat/completions", messages=each, max_tokens=9, temperature=0).json["choices"][0]["message"]
        for each in (chat, CHAT)
    ]
    assert found[0] == found[1]


def test_messages_and_responses_give_the_chats_text(server, model):
    expected = model.chat(CHAT, 12)
    asked = {"system": "Be brief.", "messages": CHAT[1:], "max_tokens": 12, "temperature": 0}
    whole = server.post("/v1/messages", **asked).json
    assert whole["content"] == [{"type": "text", "text": expected.text}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    assert whole["usage"] == {"input_tokens": len(expected.prompt_token_ids), "output_tokens": 12}
    counted = server.post("/v1/messages/count_tokens", system="Be brief.", messages=CHAT[1:]).json
    assert counted == {"input_tokens": len(expected.prompt_token_ids)}
    events = server.post("/v1/messages", stream=True, **asked).events
    assert "".join(event["delta"].get("text", "") for event in events if "delta" in event) == expected.text
    asked = {"instructions": "Be brief.", "input": "Where is the map?", "max_output_tokens": 12, "temperature": 0}
    whole = server.post("/v1/responses", **asked).json
    assert whole["output"][0]["content"][0]["text"] == expected.text
    assert (whole["status"], whole["usage"]["output_tokens"]) == ("incomplete", 12)
    events = server.post("/v1/responses", stream=True, **asked).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == expected.text
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


def test_prompts_in_every_form_are_answered_in_order(server, model):
    ids = [[3, 14, 15], [9, 2, 6, 5]]
    for prompt in (["The map was", "Once"], ids):
        expected = [found.text for found in model.generate(prompt, 6)]
        assert texts(server.post("/v1/completions", prompt=prompt, max_tokens=6, temperature=0)) == expected
        assert (
            texts(server.post("/v1/completions", prompt=prompt, max_tokens=6, temperature=0, stream=True)) == expected
        )
    twice = server.post("/v1/completions", prompt=ids, n=2, max_tokens=6, temperature=0).json
    assert [choice["index"] for choice in twice["choices"]] == [0, 1, 2, 3]
    assert twice["usage"] == {"prompt_tokens": 7, "completion_tokens": 24, "total_tokens": 31}
    assert [choice["text"] for choice in twice["choices"]] == [
        one.text for one in model.generate([ids[0], *ids, ids[1]], 6)
    ]


def test_seeds_draw_what_the_python_interface_draws(server, model):
    settings = {"temperature": 3.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
    expected = [model.generate("Once", 8, seed=seed, **settings).text for seed in (7, 8, 9)]
    answer = server.post("/v1/completions", prompt="Once", max_tokens=8, n=3, seed=7, **settings)
    assert texts(answer) == expected
    drawn = {texts(server.post("/v1/completions", prompt="Once", max_tokens=16, temperature=9.0))[0] for _ in range(3)}
    assert len(drawn) > 1  # without a seed


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text(server, model, stream):
    whole = model.generate("The map was", 24).text
    stop = whole[4:7]
    fields = {"prompt": "The map was", "max_tokens": 24, "temperature": 0, "stream": stream}
    for given in (stop, ["nowhere", stop]):
        answer = server.post("/v1/completions", stop=given, **fields)
        assert texts(answer) == [whole[: whole.index(stop)]]
        last = (answer.events or [answer.json])[-1]["choices"][0]
        assert last["finish_reason"] == "stop"
    chat = model.chat(CHAT, 24).text
    asked = {"system": "Be brief.", "messages": CHAT[1:], "max_tokens": 24, "temperature": 0}
    cut = server.post("/v1/messages", stop_sequences=[chat[3:5]], **asked).json
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", chat[3:5])
    assert cut["content"][0]["text"] == chat[: chat.index(chat[3:5])]


def test_logprobs_of_new_tokens_are_the_python_interfaces(server, model):
    expected = model.generate("The map was", 5, logprobs=3)
    answer = server.post("/v1/completions", prompt="The map was", max_tokens=5, temperature=0, logprobs=3).json
    found = answer["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
    assert [max(top.values()) for top in found["top_logprobs"]] == found["token_logprobs"]
    assert [len(top) for top in found["top_logprobs"]] == [3] * 5
    chat = server.post(
        "/v1/chat/completions", messages=CHAT, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    ).json["choices"][0]
    told = model.chat(CHAT, 5, logprobs=2).logprobs
    assert [one["logprob"] for one in chat["logprobs"]["content"]] == pytest.approx([t.logprob for t in told], abs=1e-4)
    assert [len(one["top_logprobs"]) for one in chat["logprobs"]["content"]] == [2] * 5


@pytest.mark.slow
def test_bytes_of_logprobs_join_to_the_text(server):
    """Also of characters that several tokens make up; and likely tokens without a whole one have texts of their own."""
    asked = {"max_tokens": 200, "temperature": 20, "seed": 5}
    choice = server.post("/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=1, **asked).json["choices"][
        0
    ]
    told = choice["logprobs"]["content"]
    data = bytes(byte for one in told for byte in one["bytes"])
    assert data.decode(errors="replace") == choice["message"]["content"]
    parts = [one for one in told if one["token"].startswith("bytes:")]
    assert parts
    assert all(one["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in one["bytes"]) for one in parts)
    choice = server.post("/v1/completions", prompt="The map was", logprobs=20, **asked).json["choices"][0]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"]} == {20}
    assert not [text for top in choice["logprobs"]["top_logprobs"] for text in top if "\ufffd" in text]
    starts, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    whole = [(start, token) for start, token in zip(starts, tokens, strict=True) if ":" not in token]
    text = "".join(token for token in tokens if not token.startswith("bytes:"))
    assert len(whole) > 50
    if "bytes:" not in "".join(tokens):
        assert all(text.startswith(token, start) for start, token in whole)


@pytest.mark.slow
def test_an_answer_was_created_when_it_was_asked_for(server, monkeypatch):
    before_s = int(time.time())
    for path, fields in (
        ("/v1/completions", {"prompt": "Once"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "Once"}),
    ):
        found = server.post(path, **fields).json
        assert before_s <= found["created_at" if path.endswith("responses") else "created"] <= time.time()


def test_echo_scores_the_prompt_as_evaluation_harnesses_ask_for_it(artifact, server):
    """Nested token ids, one token, log-probabilities of the prompt; against the logits of a dense prefill."""
    prompts = [[3, 14, 15, 92], [65, 35, 89, 79, 32]]
    fields = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    choices = server.post("/v1/completions", prompt=prompts, **fields).json["choices"]
    session = Session(artifact.path, dram_budget_bytes=10**9)
    for ids, choice in zip(prompts, choices, strict=True):
        session.decoder.begin(len(ids))
        logits = session.decoder.prefill(np.array(ids)).astype(np.float64)
        scores = logits - np.log(np.exp(logits).sum(axis=1))[:, None]
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        expected = [scores[place, token] for place, token in enumerate(ids[1:])]
        assert told["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        assert [max(top.values()) for top in told["top_logprobs"][1:]] == pytest.approx(scores.max(axis=1), abs=1e-4)
        assert {len(told[name]) for name in told} == {len(ids) + 1}


def test_echo_repeats_the_prompt_with_or_without_new_tokens(server, model):
    expected = model.generate("The map was", 6).text
    fields = {"prompt": "The map was", "temperature": 0, "echo": True}
    for stream in (False, True):
        assert texts(server.post("/v1/completions", max_tokens=6, stream=stream, **fields)) == [
            f"The map was{expected}"
        ]
        assert texts(server.post("/v1/completions", max_tokens=0, stream=stream, **fields)) == ["The map was"]
    scored = server.post("/v1/completions", max_tokens=0, logprobs=0, **fields).json
    assert scored["usage"]["completion_tokens"] == 0
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == scored["usage"]["prompt_tokens"]


def test_the_small_endpoints(server, model):
    listed = server.send("GET", "/v1/models").json
    assert [one["id"] for one in listed["data"]] == ["tiny"]
    assert server.send("GET", "/v1/models/tiny").json == listed["data"][0]
    assert server.send("GET", "/health").json == {"status": "ok"}
    assert server.post("/tokenize", content="The map was").json == {"tokens": model.encode("The map was")}
    pieces = server.post("/tokenize", content="The map", with_pieces=True, add_special=False).json["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "The map"
    page = server.send("GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"://" not in page.body.replace(b"http://www.w3.org", b"")  # it loads nothing from elsewhere


def test_metrics_count_tokens_and_shared_passes(server):
    before = server.metrics()
    server.post("/v1/completions", prompt=[[3, 14, 15], [9, 2, 6, 5]], n=4, max_tokens=7, temperature=0)
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["sequences_total"] == 8
    assert grown["prompt_tokens_total"] == 4 * 7
    assert grown["new_tokens_total"] == 8 * 7
    assert (grown["prefills_total"], grown["passes_total"]) == (1, 6)  # shared by all eight
    assert grown["hits_total"] > 0
    assert 0 < after["dram_used_bytes"] <= after["dram_budget_bytes"] == 10**9
    assert (after["running"], after["waiting"], grown["cancelled_total"]) == (0, 0, 0)
    assert json.dumps(after)


@pytest.mark.slow
def test_an_end_of_sequence_token_ends_the_text_in_every_interface(artifact, model, tmp_path):
    """The artifact is told that a token which the greedy text has is such a token."""
    chat = [CHAT[0], {"role": "user", "content": "Hi"}]
    ids = model.chat(chat, 12).token_ids
    last = next(place for place in range(1, 12) if ids[place] not in ids[:place])
    path = shutil.copytree(artifact.path, tmp_path / "a.coldpress")
    change_manifest(path, lambda manifest: manifest["model"].update(eos_token_ids=[ids[last]]), relist=True)
    with coldpress.load(path) as ending:
        expected = ending.chat(chat, 12)
    assert (expected.token_ids, expected.finish_reason) == (ids[: last + 1], "stop")
    with serving_here(path) as server:
        fields = {"messages": chat[1:], "max_tokens": 12, "temperature": 0}
        whole = server.post("/v1/chat/completions", **fields | {"messages": chat}).json
        assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("stop", last + 1)
        assert whole["choices"][0]["message"]["content"] == expected.text
        told = server.post("/v1/messages", system="Be brief.", **fields).json
        assert (told["stop_reason"], told["stop_sequence"]) == ("end_turn", None)
        asked = {"instructions": "Be brief.", "input": "Hi", "max_output_tokens": 12, "temperature": 0}
        assert server.post("/v1/responses", **asked).json["status"] == "completed"
        events = server.post("/v1/responses", stream=True, **asked).events
        assert events[-1]["type"] == "response.completed"
