"""What the server refuses, and how: by name, before it costs anything."""

import json

import pytest

from coldpress.cli.main import main
from tests.support.artifacts import build_artifact
from tests.support.serving import serving, serving_here

CHAT = [{"role": "user", "content": "Where is the map?"}]
GOOD = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/responses": {"input": "Once", "max_output_tokens": 2},
    "/tokenize": {"content": "Once"},
    "/admin/dram": {"dram": "1GB"},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
BOOKKEEPING = {
    "user": "u-17",
    "metadata": {"session": 1},
    "store": True,
    "prompt_cache_key": "k",
    "service_tier": "flex",
}
NO_EFFECT = {
    "/v1/completions": {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "best_of": 1,
        "logit_bias": {},
        "suffix": None,
    },
    "/v1/chat/completions": {"frequency_penalty": 0, "tools": [], "store": False, "response_format": {"type": "text"}},
    "/v1/messages": {"tools": [], "thinking": {"type": "disabled"}, "metadata": {}},
    "/v1/responses": {"tools": [], "store": False, "truncation": "disabled", "text": {"format": {"type": "text"}}},
}
DRAWN = {path: {"temperature": 0} for path in GOOD if path.startswith("/v1") and "count" not in path}
UNSUPPORTED = [
    ("/v1/completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
    ("/v1/completions", {"suffix": "end"}, "suffix"),
    ("/v1/completions", {"best_of": 3}, "best_of"),
    ("/v1/completions", {"logit_bias": {"5": 1.0}}, "logit_bias"),
    ("/v1/completions", {"temperature": -1}, "temperature"),
    ("/v1/completions", {"temperature": "hot"}, "temperature"),
    ("/v1/completions", {"n": 0}, "n"),
    ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools"),
    ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "response_format.type"),
    ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    (
        "/v1/chat/completions",
        {"messages": [*CHAT, {"role": "assistant", "tool_calls": [CALL]}]},
        "messages.1.tool_calls",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": None}]},
        "messages.0.content' is null, expected",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, '0.content.0.type\' is "image_url"'),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "expected text or a list"),
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "'functions' is not supported"),
    ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", {"max_completion_tokens": 2}, "max_tokens"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
    ("/v1/messages", {"messages": [*CHAT, {"role": "assistant", "content": "It"}]}, "last message"),
    ("/v1/completions", {"temperature": 101}, "expected at most 100"),
    ("/v1/completions", {"prompt": [3, "x"]}, "'prompt.1' is \"x\", expected a whole number"),
    ("/v1/completions", {"stop": ["a"] * 17}, "expected text or a list of at most 16"),
    ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"reasoning": {"effort": "low"}}, "reasoning"),
    ("/tokenize", {"content": 5}, "content"),
    ("/admin/dram", {"dram": "plenty"}, "plenty"),
]


def sentence(answer):
    """The sentence of a refusal, which is in the form of the path's clients."""
    error = answer.json["error"]
    assert isinstance(error["type"], str)
    return error["message"]


@pytest.mark.parametrize("path", GOOD)
def test_an_unknown_field_is_a_400_that_names_it(server, path):
    answer = server.post(path, **GOOD[path], beam_width=5)
    assert answer.status == 400
    assert "'beam_width' is not supported" in sentence(answer)
    assert server.post(path, **GOOD[path], **NO_EFFECT.get(path, {})).status == 200


@pytest.mark.parametrize(("path", "fields", "named"), UNSUPPORTED)
def test_a_value_that_is_not_supported_is_a_400_that_names_its_field(server, path, fields, named):
    answer = server.post(path, **GOOD[path] | fields)
    assert answer.status == 400, answer.body
    assert named in sentence(answer)
    leaked = ("Input should", "validation", "valid string", "None", "True", "False")
    assert not [words for words in leaked if words in sentence(answer)], sentence(answer)


@pytest.mark.parametrize("path", [path for path in GOOD if path.startswith("/v1")])
def test_what_clients_say_for_their_own_bookkeeping_is_ignored(server, path):
    """And without a model's name the only one answers."""
    expected = server.post(path, **GOOD[path], **DRAWN.get(path, {})).json
    answer = server.send("POST", path, {**GOOD[path], **DRAWN.get(path, {}), **BOOKKEEPING})
    assert answer.status == 200, answer.body
    assert answer.json.get("usage") == expected.get("usage")


def test_speakers_and_assistants_without_text_are_taken(server):
    said = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
    chat = [{**said, "name": "Bo"}, {"role": "assistant", "content": None, "refusal": None, "tool_calls": []}, said]
    bare = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "Hi"}]
    found, expected = (
        server.post("/v1/chat/completions", messages=messages, max_tokens=3, temperature=0).json
        for messages in (chat, bare)
    )
    assert (found["choices"], found["usage"]) == (expected["choices"], expected["usage"])


def test_a_missing_field_another_model_or_no_json_is_told(server):
    assert "'prompt' is missing" in sentence(server.post("/v1/completions"))
    answer = server.post("/v1/completions", prompt="Once", model="gpt-5")
    assert (answer.status, answer.json["error"]["param"]) == (404, "model")
    assert "no model 'gpt-5', expected 'tiny'" in sentence(answer)
    for body in (b"", b"{", b"[]", b"\xff", b'{"model":"tiny","prompt":"x"} {}', b"[" * 100_000):
        answer = server.send("POST", "/v1/completions", body)
        assert answer.status == 400, (body[:40], answer.body)
    answer = server.send("POST", "/v1/completions", b"{}", **{"content-type": "text/plain"})
    assert answer.status == 415
    assert "expected 'application/json'" in sentence(answer)
    assert server.send("GET", "/v1/embeddings").status == 404
    assert server.send("GET", "/v1/completions").status == 405
    assert "id 99999 is outside the vocabulary" in sentence(server.post("/v1/completions", prompt=[3, 99999]))
    assert "no tokens" in sentence(server.post("/v1/completions", prompt=[[3], []]))
    assert "'prompt' is empty" in sentence(server.post("/v1/completions", prompt=[]))


def test_what_is_too_long_is_a_413_before_it_costs_anything(artifact):
    with serving_here(artifact.path, max_body_bytes=60_000, max_queue=4) as server:
        answer = server.post("/v1/completions", prompt="x" * 70_000)
        assert answer.status == 413
        assert "more than 60000 bytes" in sentence(answer)
        chunked = server.connection()
        # Longer than the sockets' buffers hold: the refusal waits until the client has sent all of it.
        chunked.request("POST", "/v1/completions", iter([b"x" * 40_000] * 20), {"content-type": "application/json"})
        assert chunked.getresponse().status == 413
        chunked.close()
        for fields, named in (
            ({"prompt": list(range(300)) * 2}, "a prompt has 600 tokens, expected at most 511"),
            ({"prompt": "x" * 50_000}, "a text has 50000 characters"),
            ({"prompt": "Once", "max_tokens": 600}, "expected at most 512 together"),
            ({"prompt": "Once", "n": 5}, "the request has 5 sequences, expected at most 4"),
        ) * 2:  # more often than there are places: a refused request gives its own back
            answer = server.post("/v1/completions", **fields)
            assert answer.status == 413, answer.body
            assert named in sentence(answer)
        assert server.metrics()["prompt_tokens_total"] == 0
        assert server.post("/v1/completions", prompt="Once", max_tokens=2).status == 200


def test_a_key_is_asked_for_everywhere_but_at_health_and_the_page(artifact):
    with serving_here(artifact.path, key="sesame") as server:
        for path, fields in GOOD.items():
            body = json.dumps({"model": "tiny", **fields} if path.startswith("/v1") else fields).encode()
            for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic sesame"}, {"x-api-key": "é"}):
                answer = server.send("POST", path, body, **{name: value.encode() for name, value in headers.items()})
                assert answer.status == 401
                assert "the key is missing or wrong" in sentence(answer)
            for headers in ({"authorization": "Bearer sesame"}, {"x-api-key": "sesame"}):
                assert server.send("POST", path, body, **headers).status == 200
        assert [server.send("GET", path).status for path in ("/metrics", "/v1/models")] == [401, 401]
        assert [server.send("GET", path).status for path in ("/health", "/")] == [200, 200]


def test_pages_of_other_sites_do_not_reach_it_by_a_name_of_their_own(server):
    assert server.send("GET", "/v1/models", host="evil.example").status == 400


def test_an_artifact_without_template_or_tokenizer_says_so(tmp_path):
    with serving_here(build_artifact(tmp_path / "a").path) as server:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            answer = server.post(path, **GOOD[path])
            assert answer.status == 400
            assert "no chat template" in sentence(answer)
        assert "no tokenizer; give token ids" in sentence(server.post("/v1/completions", prompt="Once"))
        found = server.post("/v1/completions", prompt=[1, 2], max_tokens=3, logprobs=1).json["choices"][0]
        assert len(found["logprobs"]["tokens"]) == 3


def test_what_cannot_be_served_is_one_sentence(capsys, tmp_path, artifact, server):
    for arguments, named in (
        ([tmp_path / "nothing"], "nothing"),
        ([artifact.path, "--dram", "5"], "budget"),
        ([artifact.path, "--port", server.port], "cannot listen on 127.0.0.1, port"),
        ([artifact.path, "--max-batch", 99], "max_batch is 99, expected 1 to 32"),
        ([artifact.path, "--batch-tokens", 10**9], "batch_tokens is 1000000000"),
    ):
        assert main(["serve", *map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert named in captured.err


@pytest.mark.slow
def test_the_key_may_be_in_a_variable(artifact, monkeypatch):
    monkeypatch.setenv("COLDPRESS_KEY", "sesame")
    with serving(artifact.path) as server:
        assert server.send("GET", "/v1/models").status == 401
        assert server.send("GET", "/v1/models", authorization="Bearer sesame").status == 200
