"""Prompts become the ids that transformers gives, and ids become text, also one at a time."""

import json

import pytest

from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ArtifactError
from tests.support.data import data_folder
from tests.support.models import write_tokenizer
from tests.support.tokenizers import FakeArtifact

MODELS = (
    *("stories260k", "tinystories656k", "tinystories656k-relu"),
    *("tinystories-opt-0.9m", "tinystories-mixtral-8x", "prose7m", "prose7m-relu"),
)
TEXTS = ("Once upon a time, there was a little dog.", 'He said: "Don\'t!" and left.', "x", "")


def load_real(name):
    folder = data_folder() / "models" / name
    config = json.loads((folder / "config.json").read_text())
    return folder, TextCodec(FakeArtifact(folder, config["bos_token_id"]))


@pytest.mark.needs_data
@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_transformers(name):
    from transformers import AutoTokenizer

    folder, codec = load_real(name)
    reference = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert codec.encode(text) == reference(text)["input_ids"], text


@pytest.mark.needs_data
@pytest.mark.parametrize("name", MODELS)
def test_text_leaves_out_special_tokens_and_keeps_the_seam(name):
    _, codec = load_real(name)
    ids = codec.encode(TEXTS[0])
    assert codec.decode(ids) == TEXTS[0]
    for cut in range(1, len(ids)):
        assert codec.decode(ids[:cut]) + codec.continuation(ids[:cut], ids[cut:]) == TEXTS[0]
        step = codec.streamer(ids[:cut])
        assert codec.decode(ids[:cut]) + "".join(step(token_id) for token_id in ids[cut:]) == TEXTS[0]


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path, 384)
    return tmp_path


def test_a_missing_beginning_of_sequence_token_is_added(folder):
    codec = TextCodec(FakeArtifact(folder, bos_token_id=0))
    without = TextCodec(FakeArtifact(folder, bos_token_id=None)).encode("The map")
    assert codec.encode("The map") == [0, *without]
    write_tokenizer(folder, 384, add_bos_token=False)
    assert TextCodec(FakeArtifact(folder, bos_token_id=0)).encode("The map") == without


def test_a_token_is_the_bytes_that_it_adds_to_a_text(folder):
    codec = TextCodec(FakeArtifact(folder))
    text = "The map, said he; 日本語 twice 🦜."
    ids = codec.encode(text)
    assert b"".join(map(codec.piece, ids)) == text.encode()
    assert b"\xf0" in map(codec.piece, ids)
    assert codec.piece(0) == b""


@pytest.mark.needs_data
@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_real_tokens_join_to_the_text(name):
    """Vocabularies with a fall-back to bytes have tokens such as <0xE6>, and begin words with a space."""
    _, codec = load_real(name)
    text = "Once upon a time 日本語."
    assert b"".join(map(codec.piece, codec.encode(text))).decode().strip() in (text, codec.decode(codec.encode(text)))


def test_a_prompt_is_neither_cut_nor_filled_up(folder):
    """Whatever tokenizer.json says about training: a prompt of more tokens than that is the user's."""
    text = "The map was wrong about the bridge"
    whole = TextCodec(FakeArtifact(folder)).encode(text)
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    described["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    described["padding"] = {
        "strategy": {"Fixed": 100},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    path.write_text(json.dumps(described))
    assert 3 < len(whole) < 100
    assert TextCodec(FakeArtifact(folder)).encode(text) == whole


def test_a_character_of_several_tokens_appears_with_its_last(folder):
    codec = TextCodec(FakeArtifact(folder))
    ids = codec.encode("a 日")
    step = codec.streamer(ids[:2])
    pieces = [step(token_id) for token_id in ids[2:]]
    assert pieces[-1].endswith("日")
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_not_printed(folder):
    codec = TextCodec(FakeArtifact(folder))
    ids = codec.encode("The map")
    assert codec.decode([*ids, 1]) == "The map"
    assert codec.streamer(ids)(1) == ""
    assert codec.continuation(ids, [1]) == ""


def test_an_artifact_without_a_tokenizer_says_so(tmp_path):
    assert TextCodec.of(FakeArtifact(tmp_path)) is None
    with pytest.raises(ArtifactError, match=r"has no tokenizer/tokenizer.json; give token ids"):
        TextCodec(FakeArtifact(tmp_path))


def test_a_damaged_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"tokenizer/tokenizer.json: not a tokenizer"):
        TextCodec(FakeArtifact(folder))
    write_tokenizer(folder, 384)
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(ArtifactError, match=r"tokenizer_config.json: the text is not JSON"):
        TextCodec(FakeArtifact(folder))
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ArtifactError, match=r"tokenizer_config.json: the text is nested too deeply"):
        TextCodec(FakeArtifact(folder))
