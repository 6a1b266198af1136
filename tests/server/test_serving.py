"""Requests side by side: they share passes, leave, wait, are refused, and end in order."""

import contextlib
import http.client
import json
import shutil
import signal
import socket
import threading
import time

import numpy as np
import pytest

import coldpress
from coldpress.runtime.generate.sampling import Chooser
from tests.support.artifacts import add_draft_model
from tests.support.command_line import run, speaking_artifact
from tests.support.serving import WAIT_S, serving, serving_here

LONG = {"prompt": "The map was", "max_tokens": 480, "temperature": 0}


@pytest.fixture(scope="module")
def here(artifact):
    with serving_here(artifact.path, dram_budget_bytes=10**9, max_queue=4, max_batch=2, keep_alive_s=0.05) as server:
        yield server


def begin(server, **fields):
    """Sends a request to /v1/completions, and returns its connection without waiting."""
    connection = server.connection()
    body = json.dumps({"model": server.name, **fields})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


def end(connection):
    """Returns the text of a whole answer."""
    answer = connection.getresponse()
    assert answer.status == 200
    text = json.loads(answer.read())["choices"][0]["text"]
    connection.close()
    return text


def test_requests_that_arrive_together_share_passes(here, model):
    before = here.metrics()
    with here.held():
        opened = [begin(here, prompt=prompt, max_tokens=9, temperature=0) for prompt in ("Once", "The map", "A")]
        here.wait_for(lambda now: now["waiting"] + now["running"] == 3)
    texts = sorted(map(end, opened))
    expected = [model.generate(prompt, 9) for prompt in ("Once", "The map", "A")]
    assert texts == sorted(one.text for one in expected)
    after = here.metrics()
    # the first may begin alone; of three with two places, the last begins as soon as one is free
    num_tokens = sum(len(one.token_ids) for one in expected)
    assert after["passes_total"] - before["passes_total"] < num_tokens - 3
    assert after["new_tokens_total"] - before["new_tokens_total"] == num_tokens


def test_a_full_queue_is_a_429_and_empties_again(here):
    with here.held():
        opened = [begin(here, **LONG)]
        here.wait_for(lambda now: now["running"] == 1)
        for number in range(4):
            opened.append(begin(here, **LONG))
            here.wait_for(lambda now, number=number: now["waiting"] + now["running"] == number + 2)
        before = here.metrics()
        found = [here.post("/v1/completions", **LONG) for _ in range(2)]
        assert {answer.status for answer in found} == {429}
        assert found[0].json["error"]["message"] == "4 sequences wait already, expected fewer; ask again later"
        assert "retry-after" in found[0].headers
        assert here.metrics() == before
        for connection in opened:
            connection.close()
        here.wait_for(lambda now: now["waiting"] == 0)
    here.wait_for(lambda now: now["running"] == 0)
    assert here.post("/v1/completions", prompt="Once", max_tokens=2).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(here, stream):
    before = here.metrics()
    with here.held():
        opened = [begin(here, stream=stream, **LONG) for _ in range(3)]
        here.wait_for(lambda now: now["waiting"] + now["running"] == 3)
        for connection in opened:
            connection.close()
        here.wait_for(lambda now: now["waiting"] == 0)
    after = here.wait_for(lambda now: now["running"] == 0)
    assert after["cancelled_total"] - before["cancelled_total"] == 3
    assert after["new_tokens_total"] - before["new_tokens_total"] < 20  # of 1440
    assert here.post("/v1/completions", prompt="Once", max_tokens=2).status == 200


def test_a_long_prefill_is_kept_alive_by_comments(here, model):
    with here.held():
        connection = begin(here, stream=True, prompt="Once", max_tokens=3, temperature=0)
        answer = connection.getresponse()
        assert answer.readline() == b": the model is working\n"
    events = [line for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    answer.close()
    connection.close()
    text = "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in events)
    assert text == model.generate("Once", 3).text


@pytest.mark.slow
def test_the_budget_changes_while_it_runs(artifact, model):
    expected = model.generate("The map was", 480).text
    with serving_here(artifact.path) as server:
        small = server.metrics()
        with server.streamed(**LONG) as answer:
            answer.readline()
            assert server.post("/admin/dram", dram="1GB").json["dram_budget_bytes"] == 10**9
            assert answer.read().endswith(b"data: [DONE]\n\n")
        large = server.metrics()
        assert large["dram_budget_bytes"] == 10**9 > small["dram_budget_bytes"]
        assert large["dram_used_bytes"] > small["dram_used_bytes"]
        found = [server.post("/v1/completions", **LONG).json["choices"][0]["text"] for _ in range(2)]
        assert found == [expected] * 2
        assert server.post("/admin/dram", dram=5).status == 400
        assert server.metrics()["dram_budget_bytes"] == 10**9
        back = server.post("/admin/dram", dram=int(small["dram_budget_bytes"])).json
        assert back["dram_budget_bytes"] == small["dram_budget_bytes"]
        assert server.post("/v1/completions", prompt="Once", max_tokens=4).status == 200


def test_while_it_stops_it_finishes_and_refuses(artifact, model):
    """A request that runs is answered whole; one that comes on an open connection is a 503, a new one has no port."""
    expected = model.generate("The map was", 30).text
    with serving_here(artifact.path, dram_budget_bytes=10**9) as server:
        with server.held():
            running = begin(server, prompt="The map was", max_tokens=30, temperature=0)
            server.wait_for(lambda now: now["running"] == 1)
            server.served.worker.refuse_more()
            answer = server.post("/v1/completions", prompt="Once")
            assert (answer.status, "the server is stopping" in answer.json["error"]["message"]) == (503, True)
            assert server.send("GET", "/health").status == 503
            server.uvicorn.handle_exit(signal.SIGTERM, None)
        assert end(running) == expected


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_process_in_order(artifact, sent):
    with serving(artifact.path) as server:
        with server.streamed(**LONG) as answer:
            assert answer.readline().startswith(b"data: ")
            server.process.send_signal(sent)
            assert answer.read().endswith(b"data: [DONE]\n\n")
        assert server.process.wait(WAIT_S) == 0
        with pytest.raises(ConnectionRefusedError):
            server.send("GET", "/health")


@pytest.mark.slow
def test_a_second_interrupt_ends_it_at_once(artifact):
    with serving(artifact.path, "--batch-tokens", 16000, "--dram", "1GB") as server:
        with server.streamed(n=32, **LONG) as answer:
            answer.readline()
            server.process.send_signal(signal.SIGINT)
            with contextlib.suppress(ConnectionRefusedError):  # until it has seen the first one
                while server.send("GET", "/health").status == 200:
                    time.sleep(0.01)
            server.process.send_signal(signal.SIGINT)
            with contextlib.suppress(http.client.IncompleteRead):
                assert not answer.read().endswith(b"data: [DONE]\n\n")
        assert server.process.wait(WAIT_S) == 0


def test_many_clients_at_once_have_their_own_texts(artifact, model):
    prompts = [[number, number + 1, 5] for number in range(24)]
    expected = [model.generate(prompt, 12).text for prompt in prompts]
    found = {}
    with serving_here(artifact.path, dram_budget_bytes=10**9) as server:

        def ask(number):
            answer = server.post("/v1/completions", prompt=prompts[number], max_tokens=12, temperature=0)
            found[number] = answer.json["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        numbers = server.metrics()
    assert [found[number] for number in range(24)] == expected
    assert (numbers["sequences_total"], numbers["failed_total"]) == (24, 0)


def test_a_half_sent_request_takes_no_place(here):
    before = here.metrics()
    with socket.create_connection((here.host, here.port)) as opened:
        opened.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        opened.sendall(b"content-length: 500\r\n\r\n{")
    assert here.post("/v1/completions", prompt="Once", max_tokens=2).status == 200
    assert here.metrics()["sequences_total"] == before["sequences_total"] + 1


@pytest.mark.slow
def test_a_prompt_with_a_known_beginning_starts_warm_after_a_restart_too(artifact, model, tmp_path):
    """Whole chunks of 256 tokens are kept; the tokens are those of a cold prefill."""
    prompt = [(5 * place) % 300 + 3 for place in range(300)]
    expected = model.generate([*prompt, 7], 12).text
    fields = {"max_tokens": 12, "temperature": 0}
    for restored in (0, 256):
        with serving_here(artifact.path, dram_budget_bytes=10**9, prefixes=str(tmp_path / "kept")) as server:
            server.post("/v1/completions", prompt=prompt, **fields)
            answer = server.post("/v1/completions", prompt=[*prompt, 7], **fields)
            assert answer.json["choices"][0]["text"] == expected
            numbers = server.metrics()
            assert numbers["prefix_restored_tokens_total"] == restored + 256
            assert numbers["prefix_kept_bytes"] > 0


def test_a_damaged_page_fails_what_reads_it_and_the_server_goes_on(artifact, tmp_path):
    path = shutil.copytree(artifact.path, tmp_path / "a.coldpress")
    image = (path / "flash.img").read_bytes()
    with serving_here(path) as server:
        expected = server.post("/v1/completions", prompt="Once", max_tokens=9, temperature=0).json["choices"]
        (path / "flash.img").write_bytes(bytes(255 - byte for byte in image))
        answer = server.post("/v1/completions", prompt="The map was wrong", max_tokens=9, temperature=0)
        assert answer.status == 500
        assert "checksum" in answer.json["error"]["message"]
        stream = server.post("/v1/completions", prompt="The map was wrong", max_tokens=9, stream=True)
        assert stream.status == 200  # which had been sent by then
        assert "checksum" in stream.events[-1]["error"]["message"]
        (path / "flash.img").write_bytes(image)
        again = server.post("/v1/completions", prompt="Once", max_tokens=9, temperature=0)
        assert (again.status, again.json["choices"]) == (200, expected)
        assert server.metrics()["failed_total"] == 2


@pytest.mark.parametrize("poisoned_at", [0, 2])
def test_a_sequence_whose_logits_are_not_finite_fails_alone(here, model, monkeypatch, poisoned_at):
    """Those that share its passes go on, and nothing of its prompt is kept."""
    choose, chosen = Chooser.choose, list[int]()

    def poisoned(self, logits):
        if self._sampling.seed == 77:
            logits = logits if len(chosen) < poisoned_at else np.full_like(logits, np.nan)
            chosen.append(choose(self, logits))
            return chosen[-1]
        return choose(self, logits)

    monkeypatch.setattr(Chooser, "choose", poisoned)
    before = here.metrics()
    with here.held():
        bad, good = (
            begin(here, prompt=prompt, max_tokens=9, temperature=0, seed=seed)
            for prompt, seed in (("The map", 77), ("Once", 1))
        )
        here.wait_for(lambda now: now["waiting"] + now["running"] == 2)
    assert end(good) == model.generate("Once", 9).text
    answer = bad.getresponse()
    assert (answer.status, "logits are not finite" in answer.read().decode()) == (500, True)
    bad.close()
    after = here.metrics()
    assert [after[name] - before[name] for name in ("failed_total", "sequences_total")] == [1, 2]


@pytest.mark.slow
def test_a_budget_may_be_a_share_of_what_the_model_takes_in_dram(artifact, capsys):
    """In every front door, under both of its flags."""
    with coldpress.load(artifact.path, dram="100%") as whole, coldpress.load(artifact.path, dram="90.5%") as part:
        all_bytes, part_bytes = whole.stats.dram_budget_bytes, part.stats.dram_budget_bytes
        assert whole.stats.dram_used_bytes <= all_bytes
        assert part_bytes == int(all_bytes * 0.905)
        whole.generate("Once", 3)
        assert (whole.stats.misses, whole.stats.dram_budget_bytes) == (0, all_bytes)
        whole.resize("90.5%")
        assert whole.stats.dram_budget_bytes == part_bytes
        for wrong in ("0%", "101%", "%"):
            with pytest.raises(coldpress.ColdpressError, match=r"expected more than 0%|not an amount of memory"):
                whole.resize(wrong)
    with serving(artifact.path, "--dram-budget", "90.5%") as server:
        assert server.metrics()["dram_budget_bytes"] == part_bytes
        assert server.post("/admin/dram", dram="100%").json["dram_budget_bytes"] == all_bytes
    found = run(
        capsys, "generate", artifact.path, "--prompt", "Once", "--max-new-tokens", 2, "--dram", "90.5%", "--json"
    )
    assert json.loads(found[1])["metrics"]["dram_budget_bytes"] == part_bytes


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """A dense model of four layers that reads most of its units, and a smaller one that drafts for it."""
    folder, own = tmp_path_factory.mktemp("drafting"), {"method": "dense", "slots_share": 0.0, "pinned_share": 0.25}
    path = speaking_artifact(folder / "a", context_length=64, recipe=own, num_hidden_layers=4).path
    small = speaking_artifact(folder / "b", context_length=64, recipe=own, num_hidden_layers=1, intermediate_size=96)
    plain = shutil.copytree(path, folder / "plain")
    add_draft_model(path, small.path)
    return path, plain


@pytest.mark.slow
def test_requests_with_drafts_get_the_texts_without(drafting):
    """One after the other and several at once, greedy and drawn, streamed and whole."""
    asked = [
        {
            "prompt": f"The map {number}" + " of it" * (number % 7),
            "max_tokens": 3 + number % 9,
            "temperature": number % 3 * 0.7,
            "seed": number,
        }
        for number in range(24)
    ]
    path, plain = drafting
    with coldpress.load(plain) as model:
        drawing = [{name: each[name] for name in ("temperature", "seed")} for each in asked]
        expected = [
            model.generate(each["prompt"], each["max_tokens"], **drawn).text
            for each, drawn in zip(asked, drawing, strict=True)
        ]
    with serving_here(path, max_batch=3) as server:
        alone = [server.post("/v1/completions", **each).json["choices"][0]["text"] for each in asked]
        drafted = server.metrics()
        opened = [begin(server, **each) for each in asked]
        together = list(map(end, opened))
        after = server.metrics()
    assert alone == together == expected
    assert drafted["drafted_total"] > 0
    assert after["drafted_total"] > drafted["drafted_total"]
    assert after["accepted_total"] <= after["drafted_total"]
