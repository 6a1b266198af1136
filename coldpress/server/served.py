"""The served artifact as requests see it: names, tokens, limits, and sequences for its worker."""

import asyncio
import secrets
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.text.chat import ChatTemplate, Message
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.server.fields import Drawing
from coldpress.server.refusals import RefusalError
from coldpress.server.run import RequestRun
from coldpress.server.sequences import Piece, Sequence, Wanted
from coldpress.server.settings import Settings
from coldpress.server.worker import Places, Worker

MAX_CHARS_PER_TOKEN = 64
"""A text with more characters for each token of the context is refused before it is tokenized: no text but long runs
of spaces has so few tokens."""
NO_TEXT = "token_id:"
"""Begins what stands for a token without text of its own, such as a special one."""


@dataclass(frozen=True)
class Served:
    name: str
    created_s: int
    """Start of the server, in seconds since 1970."""
    settings: Settings
    worker: Worker
    codec: TextCodec | None
    template: ChatTemplate | None
    """None if the artifact has none, which a chat is told."""
    eos_ids: frozenset[int]
    vocab_size: int

    def check_name(self, name: str | None) -> None:
        if name and name != self.name:
            raise RefusalError(404, f"there is no model '{name}', expected '{self.name}'; see /v1/models", "model")

    async def encoded(self, text: str, special: bool = True) -> list[int]:
        """Returns the token ids of a text. Raises `RefusalError` (413) if the text is too long for the context,
        `ColdpressError` if the artifact has no tokenizer, or it refuses the text."""
        if self.codec is None:
            raise RefusalError(400, "the artifact has no tokenizer; give token ids to /v1/completions")
        most = MAX_CHARS_PER_TOKEN * self.worker.context_length
        if len(text) > most:
            raise RefusalError(413, f"a text has {len(text)} characters, expected at most {most}; shorten it")
        return await asyncio.to_thread(self.codec.encode, text, special)

    async def chat_ids(self, messages: Several[Message]) -> list[int]:
        """Returns the token ids of a chat. Raises as `encoded`; or if there is no template, or it refuses the chat."""
        if self.template is None:
            raise RefusalError(
                400, "the artifact has no chat template, because its checkpoint had none; use /v1/completions"
            )
        if sum(len(message["content"]) for message in messages) > MAX_CHARS_PER_TOKEN * self.worker.context_length:
            raise RefusalError(413, "the chat has more characters than the context holds; shorten it", "messages")
        return await self.encoded(await asyncio.to_thread(self.template.render, messages), special=False)

    def num_new(self, ids: Several[int], field: str, asked: int | None, asked_by: str = "max_tokens") -> int:
        """Returns the number of new tokens after a prompt; refuses a prompt that the model cannot take, and more tokens
        than the context holds, before anything is computed. `field` and `asked_by` are the request's fields."""
        if not ids:
            raise RefusalError(400, "a prompt has no tokens, expected at least one; give a prompt", field)
        if len(ids) >= self.worker.context_length:
            raise RefusalError(
                413,
                f"a prompt has {len(ids)} tokens, expected at most {self.worker.context_length - 1} of a context of "
                f"{self.worker.context_length}; shorten it",
                field,
            )
        if unknown := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise RefusalError(
                400, f"token id {unknown[0]} is outside the vocabulary, expected 0 to {self.vocab_size - 1}", field
            )
        room = self.worker.context_length - len(ids)
        if asked is None:
            return min(self.settings.max_tokens, room)
        if asked > room:
            raise RefusalError(
                413,
                f"{len(ids)} tokens of a prompt and {asked} new ones were asked for, expected at most "
                f"{self.worker.context_length} together; give a smaller {asked_by}",
                asked_by,
            )
        return asked

    def sampling(self, drawing: Drawing) -> Sampling:
        """Returns how tokens are drawn; without a seed, anew each time."""
        given = drawing.model_dump(include=set(Sampling.model_fields), exclude_none=True)
        return Sampling.model_validate({"temperature": 1.0, "seed": secrets.randbits(62), **given})

    def submit(self, places: Places, several: Several[Wanted]) -> RequestRun:
        loop = asyncio.get_running_loop()
        pieces = asyncio.Queue[tuple[int, Piece]]()

        def made(number: int, wanted: Wanted) -> Sequence:
            def tell(piece: Piece) -> None:
                loop.call_soon_threadsafe(pieces.put_nowait, (number, piece))

            return Sequence(wanted, self.codec, self.eos_ids, tell)

        run = RequestRun([made(number, wanted) for number, wanted in enumerate(several)], pieces)
        self.worker.submit(places, run.sequences)
        return run

    def choices(self, wanted: Wanted, count: int) -> list[Wanted]:
        """Returns `count` sequences of one prompt; each has the next seed."""
        return [replace(wanted, sampling=wanted.sampling.at(place)) for place in range(count)]

    def text_of(self, token_id: int) -> str:
        """Returns a token's own text, for lists of log-probabilities; `token_id:N` where it has none, and `bytes:` and
        its bytes, as OpenAI writes them, if they are no whole characters."""
        data = self.bytes_of(token_id)
        try:
            return data.decode() or f"{NO_TEXT}{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text, none of a special one."""
        return b"" if self.codec is None else self.codec.piece(token_id)
