"""Text to token ids and back, with the artifact's own tokenizer.json (the `tokenizers` package, no transformers).

Which special tokens a prompt gets is what tokenizer.json's post-processor says; where tokenizer_config.json asks for a
beginning-of-sequence token and the post-processor adds none, it is put in front, as the classic slow tokenizers do.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import JsonError, short
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.text import rules
from coldpress.runtime.text.engine import TOKENIZER_FILE, Engine
from coldpress.runtime.text.process import LimitedEngine
from coldpress.schemas.errors import ArtifactError, ColdpressError

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
        self._engine = _engine(artifact.read_bytes(TOKENIZER_FILE, rules.JSON.size_bytes))
        settings = _settings(artifact) if SETTINGS_FILE in names else {}
        self._bos = artifact.manifest.model.bos_token_id if settings.get("add_bos_token") is True else None

    @classmethod
    def of(cls, artifact: Artifact) -> "TextCodec | None":
        """The artifact's tokenizer; None where it has none."""
        return cls(artifact) if any(entry.path == TOKENIZER_FILE for entry in artifact.manifest.files) else None

    def encode(self, text: str) -> list[int]:
        """The prompt's token ids, special tokens included.

        Raises:
            ArtifactError: if the tokenizer fails, or takes more than its limits.
            ColdpressError: if the text is no Unicode, such as an argument that is not UTF-8.
        """
        if not strict_json.is_encodable(text):
            raise ColdpressError(f"the text {short(text)} is not UTF-8; write it in UTF-8, or give token ids")
        ids = self._engine.encode(text)
        return [self._bos, *ids] if self._bos is not None and ids[:1] != [self._bos] else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._engine.decode(ids)

    def continuation(self, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
        """The text that `new_ids` add to the prompt's, spaces at the seam included."""
        before, whole = self.decode(prompt_ids), self.decode([*prompt_ids, *new_ids])
        return whole[len(before) :] if whole.startswith(before) else self.decode(new_ids)

    def streamer(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """A function that takes one new id after another and gives the text that has become certain (often one word).

        Characters of several tokens appear with their last one.
        """
        step = self._engine.stream()
        step(prompt_ids)  # what a decoder does at the start of a text must not happen at the seam
        return lambda token_id: step([token_id])


def _engine(data: bytes) -> Engine | LimitedEngine:
    values = strict_json.parse(data, partial(JsonError, TOKENIZER_FILE, "the text"), rules.JSON)
    reason = rules.why_unbounded(values)
    return Engine(data) if reason is None else LimitedEngine(data, reason)


def _settings(artifact: Artifact) -> dict[str, Any]:
    data = artifact.read_bytes(SETTINGS_FILE, strict_json.FOREIGN.size_bytes)
    settings = strict_json.parse(data, partial(JsonError, SETTINGS_FILE, "the text"), strict_json.FOREIGN)
    return settings if strict_json.is_object(settings) else {}
