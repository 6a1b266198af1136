"""`coldpress chat`: answers are the model's own, by the checkpoint's template, and a chat goes on."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import coldpress
from coldpress.cli.main import main
from tests.support.command_line import speaking_artifact

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Say = Callable[..., int]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 128}
    folder = tmp_path_factory.mktemp("speaking")
    return str(speaking_artifact(folder, context_length=128, template=TEMPLATE, **shape).path)


@pytest.fixture
def say(artifact: str, monkeypatch: pytest.MonkeyPatch) -> Say:
    def chat(lines: str, *flags: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return main(["chat", artifact, "--temperature", "0", "--max-new-tokens", "6", *flags])

    return chat


def test_an_answer_continues_all_that_was_said(say: Say, artifact: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("Hello\nAnd then?\n", "--system", "Be short.", "--json") == 0
    answers = [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines()]
    chat: list[dict[str, str]] = [{"role": "system", "content": "Be short."}]
    with coldpress.load(artifact) as model:
        for text in ("Hello", "And then?"):
            chat.append({"role": "user", "content": text})
            chat.append({"role": "assistant", "content": str(model.chat(chat, max_new_tokens=6)).strip()})
    assert answers == [chat[2]["content"], chat[4]["content"]]


def test_a_reset_forgets_and_stats_count(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("Hello\n/reset\nHello\n/stats\n\n/exit\nnever\n", "--json") == 0
    first, second, stats = capsys.readouterr().out.splitlines()
    assert json.loads(first)["answer"] == json.loads(second)["answer"]
    assert stats.startswith("12 tokens at ")


def test_a_message_without_room_or_not_in_utf_8_is_told_and_the_chat_goes_on(
    say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(f"Hello\n{'word ' * 500}\n/reset\nHello\ncaf\udce9\n/reset\nHello\n", "--json") == 0
    found = capsys.readouterr()
    lines = [json.loads(line) for line in found.out.splitlines()]
    assert [list(line) for line in lines] == [
        ["answer", "stats"],
        ["error"],
        ["answer", "stats"],
        ["error"],
        ["answer", "stats"],
    ]
    assert len({line["answer"] for line in lines[::2]}) == 1
    told = found.err.splitlines()
    assert [f"error: {line['error']}" for line in lines[1::2]] == told
    assert "/reset forgets the chat" in told[0]
    assert "is not UTF-8" in told[1]


@pytest.mark.slow
def test_an_answer_ends_where_the_context_does(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("Hello\n", "--max-new-tokens", "9999", "--json") == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["prompt_tokens"] + stats["new_tokens"] <= stats["context_length"]


def test_commands_are_listed_and_unknown_ones_told(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("/help\n/rest\n") == 0
    found = capsys.readouterr()
    assert found.out.startswith("/reset forgets the chat, ")
    assert found.err.startswith("there is no command '/rest'; /reset forgets the chat, ")


def test_without_a_template_it_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = speaking_artifact(tmp_path).path
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main(["chat", str(plain)]) == 2
    assert "chat template" in capsys.readouterr().err
