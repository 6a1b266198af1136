"""The model's tokenizer: tokenizer.json through the `tokenizers` package, and what stands before each block of text.

Reads the private folder that `ingest` made. Nothing of transformers' tokenizer classes takes part, so that the runtime,
which has none of them, reads the same.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldpress.compiler.checkpoint.source_json import read_json, read_object
from coldpress.runtime.text import rules
from coldpress.runtime.text.process import LimitedEngine
from coldpress.schemas.errors import ArtifactError, CheckpointError, clipped
from coldpress.schemas.model import ModelSpec

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
"""Where newer checkpoints keep what older ones have in their settings."""
MAX_TOKENIZER_BYTES = rules.JSON.size_bytes
MAX_SETTINGS_BYTES = 16 << 20
SAMPLE = "The quick brown fox jumps over the lazy dog 12 times or 345; a naïve façade costs 6 €.\n" * 20


class SourceTokenizer:
    """The tokenizer of a checkpoint; one that nothing is known to bound encodes every text in a limited process."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Reads it.

        Raises:
            CheckpointError: if the file is missing, not strict JSON, no tokenizer, not bounded on a short text, or has
                ids beyond the embeddings.
        """
        from tokenizers import Tokenizer

        path = folder / TOKENIZER
        if not path.is_file():
            raise CheckpointError(f"{TOKENIZER} is missing in the checkpoint; write it with save_pretrained")
        self._reason = rules.why_unbounded(read_json(path, MAX_TOKENIZER_BYTES, rules.JSON))
        self._limited: LimitedEngine | None = None
        if self._reason is not None:
            with self._limits(SAMPLE):
                self._limited = LimitedEngine(path.read_bytes(), self._reason)
            self.encode(SAMPLE, special=True)
        with _sentences("not a tokenizer"):
            self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest < 0 or largest >= vocab_size:
            raise CheckpointError(
                f"{TOKENIZER}: its largest token id is {largest}, expected ids from 0 to {vocab_size - 1}, the rows of "
                "the embeddings"
            )

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text, with those that the post-processor adds where `special` says so.

        Raises:
            CheckpointError: if the tokenizer fails on it, as its author's patterns may, or takes more than its limits.
        """
        if self._limited is not None:
            with self._limits(text):
                return self._limited.encode(text, special)
        with _sentences("it fails on ordinary text"):
            return self._tokenizer.encode(text, add_special_tokens=special).ids

    @contextmanager
    def _limits(self, text: str) -> Iterator[None]:
        try:
            yield
        except ArtifactError as error:
            raise CheckpointError(
                f"{TOKENIZER}: it has {self._reason}, and fails on {len(text):,} characters of ordinary text, or takes "
                "too much time or memory; give a checkpoint with another tokenizer"
            ) from error


def bos_of(folder: Path, spec: ModelSpec, tokenizer: SourceTokenizer) -> int | None:
    """The id that stands before each block of text, or None: the same as before a prompt (runtime/text/tokenizer.py).

    The tokenizer's own post-processor adds it, or tokenizer_config.json asks for it with `add_bos_token`.
    """
    settings: Mapping[str, Any] = {}
    if (folder / SETTINGS).is_file():
        settings = read_object(folder / SETTINGS, MAX_SETTINGS_BYTES)
    bos = spec.bos_token_id
    if bos is None or settings.get("add_bos_token") is True:
        return bos
    ids = tokenizer.encode("a", special=True)
    return bos if len(ids) > 1 and ids[0] == bos else None


@contextmanager
def _sentences(found: str) -> Iterator[None]:
    """What the package raises, as errors about the checkpoint."""
    try:
        yield
    except BaseException as error:  # a panic of the package's core is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{TOKENIZER}: {found} ({clipped(' '.join(str(error).split()))})") from error
