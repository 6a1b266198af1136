"""Tokenizers of strangers run in a limited process, and none takes the machine."""

import gc
import json
import os
import shutil
import signal

import pytest

from coldpress.runtime.artifact.errors import FileSizeError, JsonError
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.text.limited import LimitedProcess, LimitError
from coldpress.runtime.text.process import Engine, LimitedEngine
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ArtifactError
from tests.support.artifacts import change_manifest
from tests.support.models import write_tokenizer
from tests.support.tokenizers import FakeArtifact

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
DOUBLES = {"type": "Sequence", "normalizers": [DOUBLE] * 40}
APPEND = {"type": "Replace", "pattern": {"Regex": "$"}, "content": "x" * 1_000_000}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"x": {"id": "x", "ids": [0] * 100_000, "tokens": ["x"] * 100_000}},
}
TWICE = TEMPLATE | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "special_tokens": {}}
REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path, 384)
    return tmp_path


def change(folder, **parts):
    """Replaces parts of a tokenizer.json and returns its values."""
    values = json.loads((folder / "tokenizer.json").read_text()) | parts
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return values


def limited(data):
    """An engine in a limited process that has built the tokenizer."""
    engine = LimitedEngine()
    engine.load(data)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "use"),
    [
        ({"post_processor": TEMPLATE}, lambda codec: codec.encode("The map")),
        ({"normalizer": DOUBLES}, lambda codec: codec.encode("a")),
        ({"decoder": {"type": "Sequence", "decoders": [APPEND] * 10}}, lambda codec: codec.decode([5] * 1000)),
        ({"pre_tokenizer": REGEX}, lambda codec: codec.encode("a" * 64 + "b")),
    ],
    ids=["template", "normalizer", "decoder", "regex"],
)
def test_what_takes_a_machine_in_process_is_one_sentence(folder, monkeypatch, parts, use):
    """These aborted the process at 8 GiB, ran for minutes, or ended in a panic of the library's core."""
    change(folder, **parts)
    monkeypatch.setattr(LimitedEngine, "cpu_s", 1)
    before = os.times()
    with pytest.raises(ArtifactError, match=r"tokenizer/tokenizer.json: ") as caught:
        use(TextCodec(FakeArtifact(folder)))
    assert str(caught.value).count("\n") == 0
    assert sum(os.times()[:4]) - sum(before[:4]) < 60


@pytest.mark.slow
def test_time_is_limited(folder, monkeypatch):
    """WordPiece compares all pieces of a word of any length."""
    model = {"type": "WordPiece", "unk_token": "u", "continuing_subword_prefix": "", "max_input_chars_per_word": 10**9}
    values = change(folder, model=model | {"vocab": {"u": 0, "b": 1}}, added_tokens=[], post_processor=None)
    monkeypatch.setattr(LimitedEngine, "cpu_s", 1)
    for length, allowed_s in ((100_000, 1), (150_000, 2)):  # longer text may take longer, by less than it does
        engine = limited(json.dumps(values | {"pre_tokenizer": None}).encode())
        with pytest.raises(ArtifactError, match=rf"more than {allowed_s} s of processor time; give"):
            engine.encode("b" * length)


def test_a_harmless_stranger_gives_what_it_gives_in_process(folder):
    pattern = {"Regex": r"\w+|[^\w\s]+"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    change(folder, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"} | BYTES]})
    data, text = (folder / "tokenizer.json").read_bytes(), "The map, said he; 日 twice."
    here, there = Engine(data), limited(data)
    ids = here.encode(text)
    assert there.encode(text) == ids
    assert there.encode(text, special=False) == here.encode(text, special=False)
    assert there.decode(ids) == here.decode(ids)
    ours, theirs = here.stream(), there.stream()
    assert [theirs([token_id]) for token_id in ids] == [ours([token_id]) for token_id in ids]


def test_a_long_stream_outlives_many_short_ones(folder):
    data, ids = (folder / "tokenizer.json").read_bytes(), [20, 21, 22]
    ours, engine = Engine(data).stream(), limited(data)
    theirs = engine.stream()
    found = [theirs(ids[:1])]
    for _ in range(200):
        engine.stream()([5])
    found += [theirs([token_id]) for token_id in ids[1:]]
    assert found == [ours([token_id]) for token_id in ids]
    assert engine.encode("hello") == Engine(data).encode("hello")


def test_after_a_text_that_ends_the_process_all_others_go_on(folder):
    """Streams that have begun go on: their tokens are sent to the next process."""
    data = (folder / "tokenizer.json").read_bytes()
    here, there = Engine(data), limited(data)
    ids = here.encode("日 map")
    ours, theirs = here.stream(), there.stream()
    for token_id in ids:
        assert theirs([token_id]) == ours([token_id])
        os.kill(there._limited.process.pid, signal.SIGKILL)
        there._limited.process.wait()
    assert there.encode("The map") == here.encode("The map")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ("lambda frame: {}['a']", "KeyError: 'a'"),
        ("lambda frame: 'a' * (65 << 20)", "took more than 64 MiB of output"),
        ("lambda frame: 'a' * (3 << 30)", "took more than 2 GiB of memory"),
        ("lambda frame: os._exit(3)", r"has ended \(exit code 3\)"),
        ("lambda frame: all(True for _ in itertools.count())", "took more than 1 s of processor time"),
    ],
)
def test_a_limited_process_says_why_it_has_no_answer_and_answers_again(tmp_path, monkeypatch, answers, words):
    source = f"import itertools, os\nfrom coldpress.runtime.text.limited import serve\nlong = {answers}\n"
    (tmp_path / "limited_answers.py").write_text(source + "serve(lambda frame: frame == b'short' or long(frame))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = LimitedProcess("limited_answers", 1)
    process.begin(b"short")
    with pytest.raises((LimitError, ArtifactError), match=f"^{words}"):
        process.ask(b"long")
    assert process.ask(b"short") is True


BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def test_the_process_ends_with_what_uses_it(folder):
    engine = limited((folder / "tokenizer.json").read_bytes())
    pid = engine._limited.process.pid
    os.kill(pid, 0)
    del engine
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_texts_that_are_large_deep_or_no_unicode_are_refused(folder, relu_artifact, tmp_path):
    for text, words in (("[" * 900, "nested too deeply"), ('{"a": "\\ud800"}', "lone surrogates")):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(JsonError, match=f"tokenizer_config.json: .*{words}"):
            TextCodec(FakeArtifact(folder))
    path = shutil.copytree(relu_artifact.path, tmp_path / "a")
    (path / "tokenizer").mkdir()
    with (path / "tokenizer" / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    change_manifest(path, lambda manifest: None, relist=True)
    with pytest.raises(FileSizeError, match=r"67108865 bytes, expected at most 67108864"):
        TextCodec(open_artifact(path))
