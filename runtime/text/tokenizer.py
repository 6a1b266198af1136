"""Encodes and decodes text with the artifact's tokenizer.json (the `tokenizers` package, no transformers).

The post-processor of tokenizer.json adds a prompt's special tokens. If tokenizer_config.json asks for a
beginning-of-sequence token and the post-processor adds none, the token is put in front, as in transformers' slow
tokenizers.
"""

import re
from collections.abc import Callable, Sequence

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import short
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.text.chat import tokenizer_settings
from coldpress.runtime.text.process import TOKENIZER_FILE, LimitedEngine
from coldpress.schemas.errors import ArtifactError, ColdpressError

UNFINISHED = "\ufffd"
"""Stands for bytes that are no whole character."""


_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTED]
BYTE_CHARACTERS = {chr(byte): byte for byte in _PRINTED} | {chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)}
"""Character -> byte, as tokenizers with a vocabulary of bytes write them (GPT-2)."""


class TextCodec:
    def __init__(self, artifact: Artifact, engine: LimitedEngine | None = None) -> None:
        """Reads the tokenizer, and checks its digest; a new `engine` may have started while the artifact was opened.
        Raises `ArtifactError` if the artifact has no tokenizer, or it cannot be read."""
        if all(entry.path != TOKENIZER_FILE for entry in artifact.manifest.files):
            raise ArtifactError(f"the artifact has no {TOKENIZER_FILE}; give token ids instead of text")
        self._engine = engine or LimitedEngine()
        self._engine.load(artifact.read_bytes(TOKENIZER_FILE, strict_json.TOKENIZER.size_bytes))
        self._before: list[int] | None = None
        settings = tokenizer_settings(artifact)
        self._vocab_size = artifact.manifest.model.vocab_size
        self._bos = artifact.manifest.model.bos_token_id if settings.get("add_bos_token") is True else None

    @classmethod
    def of(cls, artifact: Artifact, engine: LimitedEngine | None = None) -> "TextCodec | None":
        return cls(artifact, engine) if any(entry.path == TOKENIZER_FILE for entry in artifact.manifest.files) else None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns the token ids of a prompt; `special` adds its special tokens, which a rendered chat has already.

        Raises:
            ArtifactError: if the tokenizer fails, or exceeds its limits.
            ColdpressError: if the text is not valid Unicode, such as an argument that is not UTF-8, or has a special
                token that the model has no row for.
        """
        if not strict_json.is_encodable(text):
            raise ColdpressError(f"the text {short(text)} is not UTF-8; write it in UTF-8, or give token ids")
        ids = self._engine.encode(text, special)
        if max(ids, default=0) >= self._vocab_size:
            raise ColdpressError(
                f"the text has a token with the id {max(ids)}, and the model has rows for 0 to {self._vocab_size - 1}: "
                "it is a special token that only the tokenizer has; take it out of the text"
            )
        if not special:
            return ids
        return [self._bos, *ids] if self._bos is not None and ids[:1] != [self._bos] else ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.decode(ids)

    def continuation(self, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
        """Returns the text that `new_ids` add to the prompt's, with the space between them, if there is one."""
        before, whole = self.decode(prompt_ids), self.decode([*prompt_ids, *new_ids])
        for known in (before, before.rstrip(UNFINISHED)):  # the new tokens may finish the prompt's last character
            if whole.startswith(known):
                return whole[len(known) :]
        return self.decode(new_ids)

    def piece(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text, which need not be whole characters; none of a special one."""
        if self._before is None:
            self._before = self._engine.encode("a", False)[-1:]  # some decoders strip a space at the start of a text
        text, token = self.continuation(self._before, [token_id]), self._engine.token(token_id)
        if UNFINISHED not in text:
            return text.encode()
        if fallback := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes.fromhex(fallback[1])
        known = [BYTE_CHARACTERS.get(character) for character in token]
        return text.encode() if None in known else bytes(byte for byte in known if byte is not None)

    def streamer(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """Returns a function that takes one new id at a time and returns the text that has become certain. A character
        that several tokens make up appears with the last of them."""
        step, before = self._engine.stream(), self.decode(prompt_ids)
        # some decoders strip a space at the start of a text: it must not be the space at the seam
        known = step(prompt_ids)
        held = before[len(known) :] if before.startswith(known) else ""  # of a prompt that ends inside a character

        def add(token_id: int) -> str:
            nonlocal held
            piece = step([token_id])
            if piece:
                piece, held = piece.removeprefix(held), ""
            return piece

        return add
