"""Special tokens that the files around tokenizer.json name: ids, templates and stops are those of transformers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldpress.compiler.checkpoint.source_tokenizer import SourceTokenizer
from coldpress.compiler.stages.tokenize.rows import read_template
from coldpress.runtime.text.template import Rendering
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import CheckpointError, ColdpressError
from coldpress.schemas.model import Model
from tests.support.checkpoints import edit, edit_config, refusal, run
from tests.support.models import write_model
from tests.support.tokenizers import FakeArtifact

START, END = "<|im_start|>", "<|im_end|>"
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{{ eos_token }}"
    "{{ unk_token }}{{ sep_token }}{{ pad_token }}{{ image_token }}{% endfor %}"
)
TEXTS = ("Bread wants time", f"<s>a</s> b {START}user\nHi{END} [PAD] x", "a  <s>  b</s>c")
SPARE_ROWS = 4
Files = dict[str, dict[str, Any]]
CASES: dict[str, Files] = {
    "special_tokens_map.json alone": {
        "tokenizer_config.json": {"bos_token": ..., "eos_token": ...},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>", **FLAGS}, "unk_token": "<s>"},
    },
    "special_tokens_map.json is stronger": {"special_tokens_map.json": {"eos_token": "<s>", "sep_token": "</s>"}},
    "it counts for nothing beside a decoder": {
        "tokenizer_config.json": {"added_tokens_decoder": {"0": {"content": "<s>", **FLAGS}}},
        "special_tokens_map.json": {"eos_token": "<s>"},
    },
    "decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "384": {"content": START, **FLAGS},
                "385": {"content": END, **FLAGS, "lstrip": True, "special": False},
            }
        }
    },
    "decoder that changes flags": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "0": {"content": "<s>", **FLAGS, "special": False},
                "1": {"content": "</s>", **FLAGS, "lstrip": True},
            }
        }
    },
    "added_tokens.json": {"added_tokens.json": {END: 385, START: 384}},
    "added_tokens.json of named tokens": {
        "added_tokens.json": {START: 384, END: 385},
        "tokenizer_config.json": {"eos_token": END, "additional_special_tokens": [START]},
    },
    "a list of texts": {"tokenizer_config.json": {"extra_special_tokens": [START, END]}},
    "a list of tokens": {
        "tokenizer_config.json": {
            "additional_special_tokens": [START, {"content": END, **FLAGS, "__type": "AddedToken"}]
        }
    },
    "named further tokens": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": START}}},
    "a further name": {"tokenizer_config.json": {"image_token": END}},
    "a token as an object": {
        "tokenizer_config.json": {"eos_token": {"content": "</s>", **FLAGS, "__type": "AddedToken"}}
    },
    "nulls": {"tokenizer_config.json": {"bos_token": None, "pad_token": None, "image_token": None}},
}


def written(folder: Path, files: Files, rows: int = 384 + SPARE_ROWS) -> Path:
    """Writes a model with a tokenizer of 384 tokens and rows for some more; `...` takes a key away."""
    write_model(folder, num_hidden_layers=1, vocab_size=rows, add_bos_token=False, tokenizer_size=384)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, changes in files.items():
        path = folder / name
        found = (json.loads(path.read_text()) if path.exists() else {}) | changes
        path.write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))
    return folder


def rendered(folder: Path) -> str:
    chat = [{"role": "user", "content": "Hello"}]
    return Rendering(replace(read_template(folder), is_prompt=True)).render(chat)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ids_and_chats_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    from transformers import AutoTokenizer

    folder = written(tmp_path / "tiny", CASES[case])
    model = run(folder, tmp_path / "work")
    ours, theirs = SourceTokenizer(Path(model.folder), model.spec.vocab_size), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
    chat = [{"role": "user", "content": "Hello"}]
    assert rendered(Path(model.folder)) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert model.spec.eos_token_ids[0] == theirs.eos_token_id


def test_what_needs_no_token_keeps_its_bytes(tmp_path: Path) -> None:
    folder = written(tmp_path / "tiny", {"special_tokens_map.json": {"bos_token": "<s>"}})
    model = run(folder, tmp_path / "work")
    assert Path(model.folder, "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


Change = Callable[[Path], None]


@pytest.mark.parametrize(
    ("config", "generation", "expected", "said"),
    [
        ({"bos_token_id": 7, "eos_token_id": 0}, None, (0, (1,)), ["bos_token_id is 7, the tokenizer's is 0"]),
        ({"eos_token_id": 0}, [1, 5], (0, (1, 5)), ["eos_token_id is [0], the tokenizer's is 1: texts end at [1]"]),
        ({"eos_token_id": 9}, None, (0, (1, 9)), ["eos_token_id is [9], the tokenizer's is 1: texts end at [1, 9]"]),
        ({"eos_token_id": [9, 1]}, 0, (0, (1, 9)), ["generation_config.json: eos_token_id is [0]"]),
        ({"eos_token_id": None, "bos_token_id": None}, None, (0, (1,)), []),
        ({"eos_token_id": [1, 400]}, None, (0, (1,)), ["the special tokens [400] have no row in the embeddings"]),
    ],
)
def test_the_tokenizer_decides_where_config_json_contradicts_it(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    generation: Any,
    expected: tuple[int, tuple[int, ...]],
    said: list[str],
) -> None:
    files = {} if generation is None else {"generation_config.json": {"eos_token_id": generation}}
    folder = written(tmp_path / "tiny", files)
    edit_config(folder, **config)
    spec = run(folder, tmp_path / "work").spec
    assert (spec.bos_token_id, spec.eos_token_ids) == expected
    assert [line for line in said if line not in caplog.text] == []
    assert bool(said) == any(record.levelname == "WARNING" for record in caplog.records)


@pytest.fixture
def beyond(tmp_path: Path) -> Model:
    """Returns a model whose tokenizer has two special tokens more than the embeddings have rows."""
    files = {"added_tokens.json": {"<image>": 384}, "tokenizer_config.json": {"pad_token": "[PAD]"}}
    return run(written(tmp_path / "tiny", files, rows=384), tmp_path / "work")


def test_a_special_token_without_a_row_is_refused_where_a_text_has_it(beyond: Model) -> None:
    ours = SourceTokenizer(Path(beyond.folder), beyond.spec.vocab_size)
    assert max(ours.encode("Bread wants time")) < 384
    with pytest.raises(CheckpointError, match=r"the text has the token '\[PAD\]', which has no row .* \(384 rows\)"):
        ours.encode("Bread [PAD]")


def test_so_it_is_in_a_prompt(beyond: Model) -> None:
    artifact = FakeArtifact(Path(beyond.folder))
    artifact.manifest.model.vocab_size = beyond.spec.vocab_size
    codec: Any = TextCodec(artifact)  # pyright: ignore[reportArgumentType]
    assert codec.encode("Bread wants time")
    with pytest.raises(ColdpressError, match="a token with the id 384, and the model has rows for 0 to 383"):
        codec.encode("Bread <image>")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"386": {"content": START}}}},
            f"added_tokens_decoder: the token '{START}' has the id 386, expected 384",
        ),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": START}}}}, "expected ids and tokens"),
        ({"tokenizer_config.json": {"added_tokens_decoder": [START]}}, "expected ids and tokens"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"384": START * 99}}}, "expected the text of a token"),
        ({"tokenizer_config.json": {"eos_token": {"content": 5}}}, "eos_token is {'content': 5}, expected the text"),
        ({"tokenizer_config.json": {"extra_special_tokens": [START, 5]}}, "extra_special_tokens is 5, expected"),
        ({"tokenizer_config.json": {"extra_special_tokens": 5}}, "extra_special_tokens is 5, expected"),
        ({"added_tokens.json": {START: "384"}}, "added_tokens.json: found"),
        ({"added_tokens.json": {START: 2**40}}, f"added_tokens.json: the token '{START}' has the id 1099511627776"),
    ],
)
def test_tokens_that_are_none(tmp_path: Path, files: Files, expected: str) -> None:
    assert expected in refusal(written(tmp_path / "tiny", files), tmp_path / "work")


def test_a_tokenizer_that_is_none_is_said_first(tmp_path: Path) -> None:
    folder = written(tmp_path / "tiny", {"added_tokens.json": {START: 384}})
    edit(folder / "tokenizer.json", lambda tokenizer: tokenizer.update(added_tokens=[5]))
    assert "tokenizer.json: not a tokenizer" in refusal(folder, tmp_path / "work")
