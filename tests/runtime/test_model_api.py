"""The Python interface: its names, the same text as the command line's, and what it refuses."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

import coldpress
from coldpress.cli.main import main
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from coldpress.runtime.quantities import parse_bytes
from coldpress.runtime.text import template
from coldpress.runtime.text.chat import ChatTemplate
from tests.support.artifacts import change_manifest
from tests.support.command_line import run, speaking_artifact
from tests.support.data import ROOT

TEMPLATE = """{%- for message in messages %}
    {%- if message.role not in ("system", "user") %}{{ raise_exception("no role " + message.role) }}{% endif %}
{{ "<" + message.role + ">" + message.content | trim + eos_token }}
{%- if loop.last %}{% generation %}{% set x = message.content | length %}{{ x }}{% endgeneration %}{{ x }}
{%- else %}{% continue %}{% endif %}
{%- endfor %}
{{- messages | tojson(indent=1) }}{% set ns = namespace(seen=0) %}{% set ns.seen = 3 %}{{ ns.seen }}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
CHAT = [{"role": "system", "content": " Be <brief> & kind. "}, {"role": "user", "content": "Où est la carte ?"}]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    shape = {"num_hidden_layers": 4, "max_position_embeddings": 512}
    built = speaking_artifact(folder, context_length=512, template=TEMPLATE, **shape)
    settings = {"eos_token": {"content": "</s>"}, "add_bos_token": True}
    (built.path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    change_manifest(built.path, lambda manifest: None, relist=True)
    return built


@pytest.fixture
def model(artifact):
    with coldpress.load(artifact.path) as model:
        yield model


def test_the_public_names_are_these():
    names = {"ColdpressError", "Completion", "Model", "Stats", "__version__", "build", "load", "quote"}
    assert set(coldpress.__all__) == names <= set(dir(coldpress))
    assert all(getattr(coldpress, name) is not None for name in names)
    with pytest.raises(AttributeError, match="no attribute 'open'"):
        coldpress.open  # noqa: B018 - the access is the test


def test_the_import_is_light():
    code = "import sys, coldpress; print(*{name.partition('.')[0] for name in sys.modules} & {'numpy', 'pydantic'})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.slow
def test_greedy_text_is_the_command_lines(capsys, artifact, model):
    options = ("--max-new-tokens", 24, "--temperature", 0, "--json")
    expected = json.loads(run(capsys, "generate", artifact.path, "--prompt", "The map was", *options)[1])
    found = model.generate("The map was", 24)
    assert (found.text, list(found.token_ids)) == (expected["text"], expected["token_ids"])
    assert list(found.prompt_token_ids) == expected["prompt_token_ids"]
    assert (str(found), found.finish_reason, found.stop, found.logprobs) == (found.text, "length", None, None)
    assert model.generate(found.prompt_token_ids, 24) == found
    for most in range(1, 25):  # it ends inside a character, too
        assert "".join(model.stream("The map was", most)) == model.generate("The map was", most).text


def test_a_draw_is_the_command_lines(capsys, artifact, model):
    options = ("--max-new-tokens", 8, "--temperature", 3, "--top-k", 50, "--seed", 5, "--json")
    expected = json.loads(run(capsys, "generate", artifact.path, "--prompt", "The map was", *options)[1])
    assert list(model.generate("The map was", 8, temperature=3, top_k=50, seed=5).token_ids) == expected["token_ids"]


def test_a_list_gives_a_list_whose_prompts_share_passes(artifact):
    everything = "1GB"  # sums are in the same order then
    with coldpress.load(artifact.path, dram=everything) as model:
        prompts = ["The map was", [3, 14, 15], "Once", "Upon a time there"]
        alone = [model.generate(prompt, 7) for prompt in prompts]
        before = model.stats
        assert model.generate(prompts, 7) == alone
        assert model.stats.new_tokens == before.new_tokens + 4 * 7
        drawn = model.generate(["Once", "Once"], 7, temperature=4.0, seed=3)
        assert drawn == [model.generate("Once", 7, temperature=4.0, seed=seed) for seed in (3, 4)]
        assert model.generate([]) == []
        with pytest.raises(coldpress.ColdpressError, match="mix token ids and prompts"):
            model.generate([3, "Once"])


def test_stop_ends_the_text_where_it_begins(model):
    whole = model.generate("The map was", 24).text
    stop = whole[4:7]
    cut = model.generate("The map was", 24, stop=[stop, "nowhere"])
    assert (cut.text, cut.stop, cut.finish_reason) == (whole[: whole.index(stop)], stop, "stop")
    assert "".join(model.stream("The map was", 24, stop=[stop])) == cut.text
    with pytest.raises(coldpress.ColdpressError, match="stop is the text 'ab', expected a list"):
        model.generate("Once", stop="ab")


def test_logprobs_are_those_of_the_logits(artifact, model):
    found = model.generate("The map was", 6, logprobs=3)
    assert found.logprobs is not None
    assert found.token_ids == model.generate("The map was", 6).token_ids
    session = Session(artifact.path)
    session.decoder.begin(32)
    logits = [session.decoder.prefill_last(np.array(found.prompt_token_ids))]
    logits += [session.decoder.decode(token) for token in found.token_ids[:-1]]
    for row, told, token in zip(logits, found.logprobs, found.token_ids, strict=True):
        expected = np.log(np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum())
        assert told.id == token == told.top[0][0]
        assert told.logprob == pytest.approx(expected[token], abs=1e-4)
        assert [token for token, _ in told.top] == list(np.argsort(-expected)[:3])
        assert [logprob for _, logprob in told.top] == pytest.approx(sorted(expected)[:-4:-1], abs=1e-4)


def test_a_chat_is_rendered_as_transformers_does(artifact, model):
    expected = render_jinja_template([CHAT], chat_template=TEMPLATE, add_generation_prompt=True, eos_token="</s>")[0][0]
    assert expected.endswith("<assistant>")
    assert ChatTemplate(model._session.artifact).render(CHAT) == expected
    found = model.chat(CHAT, 6)
    ids = model.chat_ids(CHAT)
    tokenizer = Tokenizer.from_file(str(artifact.path / "tokenizer" / "tokenizer.json"))
    assert ids == tokenizer.encode(expected, add_special_tokens=False).ids
    assert found == model.generate(ids, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([{"role": "tool", "content": "x"}], "the artifact's chat template refuses this chat .*no role tool"),
        ([], "the chat has no messages"),
        ([{"role": "user"}], "expected the texts role and content"),
    ],
)
def test_a_chat_that_the_template_refuses_is_one_sentence(model, messages, sentence):
    with pytest.raises(coldpress.ColdpressError, match=sentence):
        model.chat(messages)
    assert model.chat(CHAT, 2).text == model.chat(CHAT, 2).text  # the next chat has its answer


PARTS = (
    "{% for m in messages %}[{{ m.role }}] {% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{{ eos_token }}{% endfor %}"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PARTS, "[system] Be brief.</s>[user] Hi</s>"),
        ("{% for m in messages %}{{ m.content[0]['text'] + '|' }}{% endfor %}", "Be brief.|Hi|"),  # fails at a text
        (
            "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}|{% endfor %}",
            "Be brief.|Hi|",
        ),
        ("{{ messages[-1].content[0].text }}", "Hi"),  # the system's is lost in both forms
        ("{% for m in messages %}{{ m.content | upper }}|{% endfor %}", "BE BRIEF.|HI|"),  # changed, not lost
    ],
)
def test_a_template_gets_contents_in_the_form_that_it_reads(tmp_path, text, expected):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    found = ChatTemplate(open_artifact(speaking_artifact(tmp_path, template=text).path))
    assert found.render(chat) == expected


def test_a_template_that_drops_what_the_user_says_is_refused(tmp_path):
    found = ChatTemplate(open_artifact(speaking_artifact(tmp_path, template="{{ messages[0].role }}: ").path))
    with pytest.raises(coldpress.ColdpressError, match="drops the text of the user's last message"):
        found.render([{"role": "user", "content": "Hi"}])


@pytest.mark.slow
def test_a_template_that_reaches_for_the_interpreter_or_does_not_end(tmp_path, monkeypatch):
    reach = "{% set ns = namespace() %}{% set ns.__class__ = 1 %}"
    model = coldpress.load(speaking_artifact(tmp_path / "a", template=reach).path)
    with pytest.raises(coldpress.ColdpressError, match="a namespace may not have the name '__class__'"):
        model.chat(CHAT)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(template, "CPU_S", 1)
    model = coldpress.load(speaking_artifact(tmp_path / "b", template=endless).path)
    with pytest.raises(coldpress.ColdpressError, match="chat template took more than 1 s of processor time"):
        model.chat(CHAT)


def test_without_template_or_tokenizer_it_says_so(tmp_path, relu_artifact):
    model = coldpress.load(speaking_artifact(tmp_path).path)
    with pytest.raises(coldpress.ColdpressError, match=r"the artifact has no chat template.*build again"):
        model.chat(CHAT)
    model = coldpress.load(relu_artifact.path)
    found = model.generate([1, 2], 3)
    assert (found.text, len(found.token_ids)) == ("", 3)
    with pytest.raises(coldpress.ColdpressError, match=r"no tokenizer/tokenizer.json; give token ids"):
        model.stream("Once")


def test_stats_count_and_resize_changes_the_budget(model):
    assert (model.stats.new_tokens, model.stats.read_bytes, model.stats.hit_rate) == (0, 0, 0.0)
    first = model.generate("The map was", 8)
    stats = model.stats
    assert (stats.new_tokens, stats.prompt_tokens) == (8, len(first.prompt_token_ids))
    assert stats.hit_rate == stats.hits / (stats.hits + stats.misses) > 0
    assert 0 < stats.dram_used_bytes <= stats.dram_budget_bytes
    model.resize("2GB")
    assert model.stats.dram_budget_bytes == parse_bytes("2GB")
    assert model.stats.dram_used_bytes > stats.dram_used_bytes
    model.generate("The map was", 8)
    misses = model.stats.misses
    model.generate("The map was", 8)
    assert model.stats.misses == misses  # with room for everything
    with pytest.raises(coldpress.ColdpressError, match="budget"):
        model.resize(5)


def test_one_call_at_a_time_and_none_after_close(artifact):
    model = coldpress.load(artifact.path)
    pieces = model.stream("The map was", 50)
    next(pieces)
    errors = []

    def other():
        try:
            model.generate("Once", 2)
        except coldpress.ColdpressError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "in use by another call" in errors[0]
    pieces.close()
    assert model.generate("Once", 2).token_ids
    model.close()
    with pytest.raises(coldpress.ColdpressError, match="closed"):
        model.generate("Once", 2)


@pytest.mark.slow
def test_a_quote_is_the_command_lines(capsys, artifact):
    found = coldpress.quote(artifact.path, "pixel6")
    assert main(["quote", str(artifact.path), "--device", "pixel6", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert [device.device for device in found.devices] == ["pixel6"]
    told = json.loads(found.to_json())
    for quote in (told, expected):  # seconds of the search differ
        quote["devices"][0]["figures"].pop("build_s", None)
    assert told == expected


def test_a_build_refuses_what_the_command_line_refuses():
    with pytest.raises(coldpress.ColdpressError, match=r"dram_budgt.*Did you mean 'dram_budget'"):
        coldpress.build("relu-demo", "pixel6", dram_budgt="1GB")


def test_without_the_compiler_build_says_what_to_install():
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "import coldpress\n"
        "try:\n    coldpress.build\n"
        "except coldpress.ColdpressError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (
        done.stdout == "coldpress.build needs rich, which is not installed; pip install '.[compiler]' in a checkout\n"
    )
