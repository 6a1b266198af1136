"""tokenize: chats through the checkpoint's own template, as transformers renders it, and templates that are hostile."""

import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from transformers.utils import chat_template_utils

from coldpress.compiler.stages.tokenize.rows import ChatTemplate, Messages, TextRows, read_template
from coldpress.compiler.stages.tokenize.text import read_corpus
from coldpress.runtime.text import template as runtime_template
from coldpress.schemas.corpus import SPLITS
from coldpress.schemas.errors import ColdpressError
from tests.support.data import ROOT
from tests.support.models import documents, write_tokenizer

PAGES = documents(40)
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
RENDERED = "<s><|user|>Hello</s><|assistant|>Good day</s>"


def checkpoint(folder: Path, template: Any) -> Path:
    values = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def rendered(folder: Path, *chats: Messages) -> list[str]:
    template = ChatTemplate(folder)
    return [template.render(chat) for chat in chats]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_chats_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(tmp_path, 384)
    template = (
        "{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% endif %}\n"
        "{% for m in messages %}{% if loop.first and m.role == 'system' %}{% continue %}{% endif %}\n"
        "  <|{{ m['role'] }}|> {{ m['content'] | tojson }}{{ eos_token }}\n{% endfor %}"
        "{% if tools is not none or documents is not none %}{{ tools | tojson }}{% endif %}"
    )
    file = str(checkpoint(tmp_path, template) / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<s>", eos_token="</s>")
    chats = [CHAT, [{"role": "system", "content": " Be brief.\n"}, *CHAT]]
    expected = [tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False) for chat in chats]
    assert rendered(tmp_path, *chats) == expected


def test_chats_of_a_corpus_in_all_spellings(tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": [CHAT[0], {"role": "assistant", "content": page}]} for page in PAGES[:20]]
    spoken = {"from": "human", "value": "Hello"}
    rows += [{"conversations": [spoken, {"from": "gpt", "value": page}]} for page in PAGES[20:30]]
    rows += [{"prompt": CHAT[:1], "completion": [{"role": "assistant", "content": page}]} for page in PAGES[30:]]
    template = ChatTemplate(checkpoint(tmp_path, TEMPLATE))
    path = write_rows(tmp_path / "a.jsonl", rows)
    splits = read_corpus(str(path), 0, rows=TextRows(render=template.render)).splits
    texts = sorted(text for split in SPLITS for text in splits[split])
    assert texts == sorted(RENDERED.replace("Good day", page) for page in PAGES)


def test_where_the_template_is(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    assert read_template(checkpoint(tmp_path, several)).text == TEMPLATE
    for template in (None, several[:1]):
        with pytest.raises(ColdpressError, match=r"the checkpoint has no chat template; put chat_template\.jinja into"):
            read_template(checkpoint(tmp_path, template))
    (tmp_path / "chat_template.jinja").write_text("of a file")
    assert read_template(tmp_path).text == "of a file"


def test_date_and_chance_change_no_text(tmp_path: Path) -> None:
    checkpoint(tmp_path, "{{ strftime_now('%d %b %Y') }} {{ range(10000) | list | random }} {{ messages }}")
    texts = rendered(tmp_path, CHAT, CHAT) + rendered(tmp_path, CHAT)
    assert texts[0].startswith("26 Jul 2024 ")
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[1].content }}", "refuses this chat (it drops the text of the user's last message)"),
        ("{{ raise_exception('roles must alternate') }}", "refuses this chat (TemplateError: roles must alternate)"),
        ("{{ 'a' * 20000000000 }}", "took more than 2 GiB of memory for this chat; give another template"),
        ("{{ messages }}{{ 'a' * 2000000 }}", "became 2000084, expected at most"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "took more than 1 s of processor time for this chat",
        ),
    ],
)
def test_hostile_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, expected: str) -> None:
    monkeypatch.setattr(runtime_template, "CPU_S", 1)
    with pytest.raises(ColdpressError) as caught:
        rendered(checkpoint(tmp_path, template), CHAT)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_chat_that_is_refused_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*({"text": page} for page in PAGES), {"messages": CHAT}])
    template = ChatTemplate(checkpoint(tmp_path, None))
    with pytest.raises(ColdpressError, match=r"^a\.jsonl:41: the record is a chat, and the checkpoint has no chat"):
        read_corpus(str(path), 0, rows=TextRows(render=template.render))
    with pytest.raises(ColdpressError, match=r"^a\.jsonl:41: the record is a chat, and there is no template"):
        read_corpus(str(path), 0)


def test_the_jinja_that_is_asked_for_renders_chats() -> None:
    """transformers refuses every chat with an older one, which reads as if the template refused it."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["compiler"]
    least = next(Requirement(text) for text in wanted if text.startswith("jinja2"))
    needed = re.findall(r"jinja2>=([\d.]+)", inspect.getsource(chat_template_utils))
    assert needed
    assert not any(least.specifier.contains(f"{version}.dev0", prereleases=True) for version in needed)
