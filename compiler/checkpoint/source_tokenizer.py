"""The model's tokenizer: tokenizer.json through the `tokenizers` package, and the token that starts each block of text.

Reads the private folder that `ingest` made. It uses none of transformers' tokenizer classes, which the runtime does not
have, so that both give the same ids.
"""

from pathlib import Path

from coldpress.compiler.checkpoint.source_json import read_json, read_object
from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import short
from coldpress.runtime.text.process import LimitedEngine
from coldpress.schemas.errors import ArtifactError, CheckpointError
from coldpress.schemas.model import ModelSpec

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
"""Newer checkpoints have it; older ones have the template in their settings."""
MAX_TOKENIZER_BYTES = strict_json.TOKENIZER.size_bytes
MAX_SETTINGS_BYTES = 16 << 20
SAMPLE = "The quick brown fox jumps over the lazy dog 12 times or 345; a naïve façade costs 6 €.\n" * 20


class SourceTokenizer:
    """The tokenizer of a checkpoint; it encodes texts in a process with limits."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Reads the tokenizer.

        Raises:
            CheckpointError: if the file is missing, not strict JSON, no tokenizer, exceeds its limits on a short text,
                or has ordinary tokens without a row in the embeddings; added ones may lack it, as `encode` says.
        """
        from tokenizers import Tokenizer

        path = folder / TOKENIZER
        if not path.is_file():
            raise CheckpointError(f"{TOKENIZER} is missing in the checkpoint; write it with save_pretrained")
        read_json(path, MAX_TOKENIZER_BYTES, strict_json.TOKENIZER)
        self._limited = LimitedEngine()
        try:
            self._limited.load(path.read_bytes())
        except ArtifactError as error:
            told = str(error).removeprefix("tokenizer/").removesuffix("; rebuild the artifact")
            raise CheckpointError(f"{told}; give a checkpoint with another tokenizer") from error
        self._encoded(SAMPLE, special=True)
        self._tokenizer = Tokenizer.from_file(str(path))  # for its names alone: it is one, by the process with limits
        self._vocab_size = vocab_size
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder() if max(ids.values(), default=-1) >= vocab_size else {}
        largest = max((number for number in ids.values() if number not in added), default=-1)
        if largest < 0 or largest >= vocab_size:
            raise CheckpointError(
                f"{TOKENIZER}: its largest token id is {largest}, expected ids from 0 to {vocab_size - 1}, the rows of "
                "the embeddings"
            )

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Returns the ids of a text; with `special` also those that the post-processor adds.

        Raises:
            CheckpointError: if the tokenizer fails on the text, as a checkpoint's patterns can, or exceeds its limits;
                if a token of the text has no row in the embeddings.
        """
        ids = self._encoded(text, special)
        if max(ids, default=0) >= self._vocab_size:
            raise CheckpointError(
                f"{TOKENIZER}: the text has the token {short(self._tokenizer.id_to_token(max(ids)))}, which has no row "
                f"in the embeddings ({self._vocab_size} rows); take it out of the text"
            )
        return ids

    def _encoded(self, text: str, special: bool) -> list[int]:
        try:
            return self._limited.encode(text, special)
        except ArtifactError as error:
            raise CheckpointError(
                f"{TOKENIZER}: it fails on {len(text):,} characters of ordinary text, or takes too much time or "
                "memory; give a checkpoint with another tokenizer"
            ) from error


def bos_of(folder: Path, spec: ModelSpec, tokenizer: SourceTokenizer) -> int | None:
    """Returns the id that starts each block of text, or None: the same as at the start of a prompt
    (runtime/text/tokenizer.py). The tokenizer's own post-processor adds it, or tokenizer_config.json asks for it with
    `add_bos_token`."""
    settings = read_object(folder / SETTINGS, MAX_SETTINGS_BYTES) if (folder / SETTINGS).is_file() else {}
    bos = spec.bos_token_id
    if bos is None or settings.get("add_bos_token") is True:
        return bos
    ids = tokenizer.encode("a", special=True)
    return bos if len(ids) > 1 and ids[0] == bos else None
