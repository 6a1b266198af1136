"""Runs `coldpress` inside a test, and writes an artifact with a tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from coldpress.cli.main import main
from tests.support.artifacts import Built, Recipe, build_artifact, change_manifest, small_spec
from tests.support.models import write_tokenizer

VOCAB_SIZE = 384


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Runs `coldpress`; returns its exit code, standard output and standard error."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def speaking_artifact(
    folder: Path,
    *,
    context_length: int = 32,
    template: str | None = None,
    add_bos_token: bool = True,
    recipe: Mapping[str, Any] = MappingProxyType({}),
    **shape: Any,
) -> Built:
    """Writes an artifact, of a ReLU model unless `recipe` says otherwise, with a tokenizer and a chat template; `shape`
    replaces fields of the small model."""
    spec = small_spec(vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_ids=(1,), **shape)
    built = build_artifact(folder / "a.coldpress", Recipe(spec=spec, context_length=context_length, **recipe))
    (built.path / "tokenizer").mkdir()
    write_tokenizer(built.path / "tokenizer", VOCAB_SIZE, add_bos_token)
    if template is not None:
        (built.path / "tokenizer" / "chat_template.jinja").write_text(template)
    change_manifest(built.path, lambda manifest: None, relist=True)
    return built
