"""A checkpoint's tokenizer that fails on the corpus, or does not end, is one sentence."""

import json
import re
from pathlib import Path

import pytest

from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest, tokenize
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.tokenize import TokenizeConfig
from coldpress.runtime.text.process import LimitedEngine
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import Model
from tests.support.models import write_model


def refusal(model: Model, folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        tokenize.run(TokenizeConfig(corpus=str(folder / "a.txt")), model, Workspace(folder / "w", "test"))
    return str(refused.value)


def test_a_tokenizer_that_fails_on_text(tmp_path: Path) -> None:
    """Its pattern makes the library's regular expressions give up, which is a panic there, in a process of its own."""
    folder = write_model(tmp_path / "tiny", num_hidden_layers=1)
    settings = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+)+$"}, "behavior": "Isolated", "invert": False}
    settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, settings["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    model = ingest.run(IngestConfig(model=str(folder)), Workspace(tmp_path / "work", "test"))
    (tmp_path / "a.txt").write_text("\n\n".join(f"{number} " + "x" * 60 + "!" for number in range(100)))
    found = refusal(model, tmp_path)
    assert re.match(r"tokenizer.json: it fails on \d+ characters", found)


def test_a_tokenizer_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the words of its sample it does; it compares all pieces of a word of any length."""
    folder = write_model(tmp_path / "tiny", num_hidden_layers=1)
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["model"] = {
        "type": "WordPiece",
        "unk_token": "<s>",
        "continuing_subword_prefix": "",
        "max_input_chars_per_word": 10**9,
        "vocab": {"<s>": 0, "</s>": 1, "b": 2},
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    model = ingest.run(IngestConfig(model=str(folder)), Workspace(tmp_path / "work", "test"))
    (tmp_path / "a.txt").write_text("\n\n".join(f"{number} " + "b" * 100_000 for number in range(10)))
    monkeypatch.setattr(LimitedEngine, "cpu_s", 1)
    found = refusal(model, tmp_path)
    assert "it fails on 100,004 characters of ordinary text, or takes too much time" in found
