"""export: tokenizers become vocabularies that give the same tokens, or are refused.

transformers' own reader of GGUF vocabularies is the oracle; benchmarks.llama_cpp asks llama.cpp itself.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import gguf
import pytest

from coldpress.compiler.llama_cpp.splits import SPLITS
from coldpress.compiler.stages.export import _gguf_file
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError
from tests.support.artifacts import Recipe, build_artifact, change_manifest, small_spec
from tests.support.data import data_folder
from tests.support.models import documents, write_tokenizer

TEXTS = (
    "The map was wrong about the bridge, 'twas it's 1234.",
    " two  spaces\n\n\tand lines ",
    "",
    "naïve 日本 🙂",
    *documents(4),
)
WITHOUT_SPACE = tuple(text for text in TEXTS if not text.startswith(" "))
"""Where a text begins with a space, transformers' reader of SentencePiece vocabularies puts no other one in front."""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As Llama 3's tokenizer.json has it."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    spec = small_spec(vocab_size=400, num_hidden_layers=1, intermediate_size=64, bos_token_id=0, eos_token_ids=(1, 7))
    folder = tmp_path_factory.mktemp("vocabulary") / "a"
    artifact = build_artifact(folder, Recipe(spec=spec, method="dense"))
    (artifact.path / "tokenizer").mkdir()
    return artifact


def described(built: Any, data: Any, settings: Any) -> Any:
    """The artifact with another tokenizer."""
    (built.path / "tokenizer" / "tokenizer.json").write_text(json.dumps(data))
    (built.path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    change_manifest(built.path, lambda manifest: None, relist=True)
    return open_artifact(built.path)


def byte_level(tmp_path: Any) -> tuple[Any, Any]:
    write_tokenizer(tmp_path, 384)
    return tuple(json.loads((tmp_path / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))


def exported(artifact: Any, file: Any) -> dict[str, Any]:
    writer = gguf.GGUFWriter(file, "llama")
    _gguf_file.add_vocabulary(writer, artifact)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(file).fields
    return {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}


def test_bytes_with_merges(built, tmp_path):
    artifact = described(built, *byte_level(tmp_path))
    found = exported(artifact, tmp_path / "a.gguf")
    assert (found["model"], found["pre"]) == ("gpt2", "gpt-2")
    assert (found["bos_token_id"], found["eos_token_id"], found["eot_token_id"]) == (0, 1, 7)
    assert (found["add_bos_token"], found["add_eos_token"]) == (True, False)
    assert found["tokens"][:2] == ["<s>", "</s>"]
    assert found["tokens"][384:] == [f"[PAD{number}]" for number in range(384, 400)]
    types = gguf.TokenType
    assert [found["token_type"][number] for number in (0, 1, 2, 383, 384, 399)] == [
        *(types.CONTROL, types.CONTROL, types.NORMAL, types.NORMAL, types.UNUSED, types.UNUSED)
    ]
    check_with_transformers(artifact, tmp_path)


def check_with_transformers(artifact: Any, folder: Any, texts: Sequence[str] = TEXTS) -> None:
    from transformers import AutoTokenizer

    reference, codec = AutoTokenizer.from_pretrained(folder, gguf_file="a.gguf"), TextCodec(artifact)
    bos = artifact.manifest.model.bos_token_id
    for text in texts:
        ids = reference.encode(text, add_special_tokens=False)
        assert [token for token in codec.encode(text) if token != bos] == [token for token in ids if token != bos], text


def test_llama_3_s_split_has_a_name(built, tmp_path):
    data, settings = byte_level(tmp_path)
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, last]}
    data["model"]["ignore_merges"] = True
    assert exported(described(built, data, settings), tmp_path / "a.gguf")["pre"] == "llama-bpe"
    split["pattern"]["Regex"] = LLAMA3.replace("{1,3}", "")
    with pytest.raises(ColdpressError, match="with ignore_merges True and the normalizer None it is no 'qwen2'"):
        exported(described(built, data, settings), tmp_path / "b.gguf")
    data["model"]["ignore_merges"], data["normalizer"] = False, {"type": "NFC"}
    assert exported(described(built, data, settings), tmp_path / "b.gguf")["pre"] == "qwen2"


def test_smollm_s_split_has_a_name_in_both_spellings(built, tmp_path):
    """As transformers' files have it, and as a tokenizer read from a GGUF file does."""
    data, settings = byte_level(tmp_path)
    digits = {"type": "Digits", "individual_digits": True}
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [isolated | {"pattern": {"Regex": text}} for text in SPLITS["smollm"].patterns]
    for number, pieces in enumerate(([digits, last], [*splits, last | {"use_regex": False}])):
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pieces}
        assert exported(described(built, data, settings), tmp_path / f"{number}.gguf")["pre"] == "smollm"
    data["pre_tokenizer"]["pretokenizers"] = [digits | {"individual_digits": False}, last]
    with pytest.raises(ColdpressError, match="no known expression splits text"):
        exported(described(built, data, settings), tmp_path / "c.gguf")


def sentencepiece() -> Any:
    """A vocabulary in which every way to a token is a merge, by the token's score, as converters write it."""
    pieces = ["▁t", "he", "▁the", "ca", "at", "cat", "▁ca", "▁cat"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.,'"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *pieces]
    known = set(tokens)
    merges = [
        [text[:place], text[place:]]
        for text in pieces
        for place in range(1, len(text))
        if {text[:place], text[place:]} <= known
    ]
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": tokens[number], **special} for number in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(tokens)},
            "merges": merges,
        },
    }


def test_characters_with_scores(built, tmp_path):
    data = sentencepiece()
    artifact = described(built, data, {"add_bos_token": False})
    found = exported(artifact, tmp_path / "a.gguf")
    assert (found["model"], found["add_space_prefix"]) == ("llama", True)
    assert (found["add_bos_token"], found["unknown_token_id"]) == (False, 0)
    types = gguf.TokenType
    assert found["token_type"][:4] == [types.UNKNOWN, types.CONTROL, types.CONTROL, types.BYTE]
    scores = dict(zip(found["tokens"], found["scores"], strict=True))
    assert scores["▁t"] > scores["he"] > scores["▁the"] > scores["ca"] > scores["at"] > scores["cat"] > scores["▁ca"]
    assert scores["▁ca"] > scores["▁cat"] > scores["a"] == scores["<s>"]
    check_with_transformers(artifact, tmp_path, WITHOUT_SPACE)


def without_byte(data: Any) -> None:
    number = data["model"]["vocab"].pop("<0x41>")
    data["model"]["vocab"]["other"] = number


def add_token(data: Any) -> None:
    data["added_tokens"].append(data["added_tokens"][0] | {"id": 5, "content": "<x>", "lstrip": True})


SPLITTING = {"type": "Split", "pattern": {"Regex": "\\d"}, "behavior": "Isolated", "invert": False}
REFUSED: dict[str, tuple[Callable[[], Any] | None, Callable[[Any], Any], str]] = {
    "unigram": (None, lambda data: data["model"].update(type="Unigram"), "its model is 'Unigram', expected BPE"),
    "dropout": (None, lambda data: data["model"].update(dropout=0.5), "its dropout is 0.5"),
    "a space in front": (
        None,
        lambda data: data["pre_tokenizer"].update(add_prefix_space=True),
        "expected bytes without a space in front",
    ),
    "no split at all": (
        None,
        lambda data: data.update(pre_tokenizer={"type": "Sequence", "pretokenizers": []}),
        "expected bytes without a space in front",
    ),
    "another split": (
        None,
        lambda data: data.update(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLITTING, {"type": "ByteLevel", "use_regex": False}]}
        ),
        "no known expression splits text",
    ),
    "a normalizer": (None, lambda data: data.update(normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
    "an added token": (None, add_token, "the token '<x>' takes spaces or words around it into account"),
    "a missing merge": (
        sentencepiece,
        lambda data: data["model"]["merges"].remove(["▁", "cat"]),
        "'▁' and 'cat' are not merged, though '▁cat' is a token",
    ),
    "two ranks": (
        sentencepiece,
        lambda data: data["model"]["merges"].insert(0, data["model"]["merges"].pop()),
        "'▁cat' is made at two ranks",
    ),
    "no bytes": (sentencepiece, without_byte, "there is no token <0x41> for a byte"),
    "other spaces": (sentencepiece, lambda data: data.update(normalizer=None), "expected '▁' in their place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_give_other_tokens_is_refused(built, tmp_path, name):
    make, change, sentence = REFUSED[name]
    data, settings = byte_level(tmp_path)
    data = make() if make else data
    change(data)
    with pytest.raises(ColdpressError, match=sentence) as refusal:
        exported(described(built, data, settings), tmp_path / "a.gguf")
    assert "give gguf_tokenizer=false" in str(refusal.value)


def test_an_artifact_without_a_tokenizer_is_told_so(tmp_path):
    artifact = build_artifact(tmp_path / "a", Recipe(spec=small_spec(num_hidden_layers=1), method="dense"))
    with pytest.raises(
        ColdpressError, match=r"the artifact has no tokenizer/tokenizer\.json; give gguf_tokenizer=false"
    ):
        _gguf_file.add_vocabulary(gguf.GGUFWriter(None, "llama"), open_artifact(artifact.path))


@pytest.mark.needs_data
@pytest.mark.parametrize(("name", "kind"), [("prose7m", "gpt2"), ("stories260k", "llama")])
def test_real_tokenizers(tmp_path, name, kind):
    source = data_folder() / "models" / name
    data, settings = (json.loads((source / f).read_text()) for f in ("tokenizer.json", "tokenizer_config.json"))
    config = json.loads((source / "config.json").read_text())
    spec = small_spec(
        vocab_size=config["vocab_size"],
        num_hidden_layers=1,
        intermediate_size=64,
        bos_token_id=config["bos_token_id"],
        eos_token_ids=(config["eos_token_id"],),
    )
    artifact = build_artifact(tmp_path / "a", Recipe(spec=spec, method="dense"))
    (artifact.path / "tokenizer").mkdir()
    opened = described(artifact, data, settings)
    assert exported(opened, tmp_path / "a.gguf")["model"] == kind
    check_with_transformers(opened, tmp_path, TEXTS if kind == "gpt2" else WITHOUT_SPACE)
