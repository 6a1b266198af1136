"""Text to token ids and back, with the artifact's own tokenizer.json (the `tokenizers` package, no transformers).

Which special tokens a prompt gets is what tokenizer.json's post-processor says; where tokenizer_config.json asks for a
beginning-of-sequence token and the post-processor adds none, it is put in front, as the classic slow tokenizers do.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from runtime.artifact import strict_json
from runtime.artifact.errors import JsonError
from runtime.artifact.reader import Artifact
from schemas.errors import ArtifactError

TOKENIZER_FILE = "tokenizer/tokenizer.json"
SETTINGS_FILE = "tokenizer/tokenizer_config.json"


class TextCodec:
    """An artifact's tokenizer."""

    def __init__(self, artifact: Artifact) -> None:
        """Reads the tokenizer, its digest checked.

        Raises:
            ArtifactError: if the artifact has none, or it cannot be read.
        """
        names = {entry.path for entry in artifact.manifest.files}
        if TOKENIZER_FILE not in names:
            raise ArtifactError(f"the artifact has no {TOKENIZER_FILE}; give token ids instead of text")
        self._tokenizer = _parse(artifact.read_bytes(TOKENIZER_FILE))
        settings = _settings(artifact.read_bytes(SETTINGS_FILE)) if SETTINGS_FILE in names else {}
        # by id, because the library compares texts and fails to know special tokens that its normalizer has changed
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(token_id for token_id, token in added if token.special)
        self._bos = artifact.manifest.model.bos_token_id if settings.get("add_bos_token") is True else None

    @classmethod
    def of(cls, artifact: Artifact) -> "TextCodec | None":
        """The artifact's tokenizer; None where it has none."""
        return cls(artifact) if any(entry.path == TOKENIZER_FILE for entry in artifact.manifest.files) else None

    def encode(self, text: str) -> list[int]:
        """The prompt's token ids, special tokens included."""
        ids = self._tokenizer.encode(text).ids
        return [self._bos, *ids] if self._bos is not None and ids[:1] != [self._bos] else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._tokenizer.decode([token_id for token_id in ids if token_id not in self._special])

    def continuation(self, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
        """The text that `new_ids` add to the prompt's, spaces at the seam included."""
        before, whole = self.decode(prompt_ids), self.decode([*prompt_ids, *new_ids])
        return whole[len(before) :] if whole.startswith(before) else self.decode(new_ids)

    def streamer(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """A function that takes one new id after another and gives the text that has become certain (often one word).

        Characters of several tokens appear with their last one.
        """
        stream = DecodeStream()

        def step(token_id: int) -> str:
            return "" if token_id in self._special else stream.step(self._tokenizer, token_id) or ""

        for prompt_id in prompt_ids:  # what a decoder does at the start of a text must not happen at the seam
            step(prompt_id)
        return step


def _parse(data: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except BaseException as error:  # the package raises plain Exception, and a panic of its core is not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ArtifactError(f"{TOKENIZER_FILE}: not a tokenizer ({error}); rebuild the artifact") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _settings(data: bytes) -> dict[str, Any]:
    settings = strict_json.parse(data, partial(JsonError, SETTINGS_FILE, "the text"), strict_json.FOREIGN)
    return settings if isinstance(settings, dict) else {}
