"""The tokenizers of GGUF files: token ids equal llama.cpp's, on texts that hurt tokenizers."""

import json
from pathlib import Path

import pytest

from coldpress.compiler.checkpoint.gguf_files import open_gguf
from coldpress.compiler.checkpoint.gguf_tokenizer import tokenizer_of
from coldpress.compiler.llama_cpp.splits import SPLITS
from coldpress.runtime.text.tokenizer import TextCodec
from tests.support.gguf_cases import exported, with_vocabulary
from tests.support.hard_texts import HARD_TEXTS, MARKS, RARE_SPACES, around
from tests.support.llama_library import LlamaLibrary
from tests.support.tokenizers import FakeArtifact
from tests.support.vocabularies import of_bytes, of_characters

SPECIAL = ("<|begin|>", "<|stop|>", "<tool call>")
OTHERWISE = {**dict.fromkeys(("tekken", "gpt-4o", "llama4"), MARKS), "deepseek-coder": RARE_SPACES}
"""Names whose models split some texts otherwise than llama.cpp: they keep marks with their letters, or part a space of
U+0800 and above from the letter behind it."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("xllamacpp")
    return exported(tmp_path_factory.mktemp("plain"), "llama", {}, layers=1)[1]


def different(file: Path, folder: Path, special: tuple[str, ...]) -> list[str]:
    """Returns the texts whose ids are not llama.cpp's."""
    folder.mkdir()
    for name, value in zip(("tokenizer", "tokenizer_config"), tokenizer_of(model := open_gguf(file)), strict=True):
        (folder / f"{name}.json").write_text(json.dumps(value))
    bos = model.values["tokenizer.ggml.bos_token_id"]
    codec, engine = (
        TextCodec(FakeArtifact(folder, bos)),
        LlamaLibrary(file, 64, len(model.values["tokenizer.ggml.tokens"])),
    )
    texts = [*HARD_TEXTS, *(text for token in special for text in around(token))]
    found = [text for text in texts if codec.encode(text) != engine.tokenize(text)]
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pre", SPLITS)
def test_token_ids_of_bytes_equal_llama_cpp_s(plain: Path, tmp_path: Path, pre: str) -> None:
    file = with_vocabulary(plain, tmp_path / "a.gguf", **of_bytes(pre, SPECIAL))
    assert set(different(file, tmp_path / "t", SPECIAL)) <= set(OTHERWISE.get(pre, ()))


@pytest.mark.parametrize("key", ["add_space_prefix", "add_bos_token", "add_eos_token"])
@pytest.mark.parametrize("value", [True, False])
def test_token_ids_of_characters_equal_llama_cpp_s(plain: Path, tmp_path: Path, key: str, value: bool) -> None:
    file = with_vocabulary(plain, tmp_path / "a.gguf", **of_characters(SPECIAL, **{key: value}))
    assert different(file, tmp_path / "t", SPECIAL) == []
