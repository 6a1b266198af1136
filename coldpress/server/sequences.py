"""One sequence that a client asked for: what is wanted, and the pieces of text that come of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from coldpress.runtime.generate.batch import Prompt
from coldpress.runtime.generate.logprobs import TokenLogprobs, logprobs_of
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.text.stream import TextStream
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Wanted:
    """What a client wants of one sequence."""

    ids: tuple[int, ...]
    """The prompt, at least one token id."""
    sampling: Sampling
    max_new_tokens: int
    """At least 0; 0 only scores the prompt."""
    stops: tuple[str, ...] = ()
    num_top: int | None = None
    """How many likeliest tokens to tell in the place of each token; None for no log-probabilities at all."""
    scores_prompt: bool = False
    """Whether to tell the log-probabilities of the prompt's tokens, too."""


@dataclass(frozen=True)
class Piece:
    """What has become known of a sequence since its last piece."""

    text: str = ""
    num_new: int = 0
    """New tokens so far."""
    prompt: tuple[TokenLogprobs, ...] = ()
    """In the first piece of a sequence that scores its prompt: the prompt's tokens but the first, which follows
    nothing."""
    tokens: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    """Set in the last piece."""
    stop: str | None = None
    """The stop string that ended the text."""
    error: ColdpressError | None = None
    """Set in the last piece of a sequence that failed."""


class Sequence:
    """A sequence on its way through the worker; its methods are called by the worker's thread, except `cancel`."""

    def __init__(
        self, wanted: Wanted, codec: TextCodec | None, eos_ids: frozenset[int], tell: Callable[[Piece], None]
    ) -> None:
        """`tell` is called with each piece, in the worker's thread."""
        self.wanted, self.tell, self._eos_ids = wanted, tell, eos_ids
        self._text = TextStream(codec, wanted.ids, wanted.stops) if codec else None
        self._num_new = 0
        self._prompt, self._logits = list[TokenLogprobs](), np.empty(0, np.float32)
        self._error: ColdpressError | None = None
        self.cancelled = self.ended = self.was_left = False

    def cancel(self) -> None:
        """Says that nobody waits for the rest; the sequence ends at its next token or prefill pass."""
        self.cancelled = True

    def prompt(self) -> Prompt:
        """Returns what the batch runs."""
        wanted = self.wanted
        watch = self._see if wanted.num_top is not None else None
        most = max(wanted.max_new_tokens, 1)
        scores_prompt = wanted.scores_prompt and watch is not None
        return Prompt(wanted.ids, wanted.sampling, most, watch, scores_prompt, lambda: self.cancelled, self._note)

    def _note(self, error: ColdpressError) -> None:
        self._error = error

    def _see(self, position: int, logits: np.ndarray) -> None:
        ids, num_top = self.wanted.ids, self.wanted.num_top or 0
        for place, row in enumerate(logits, start=position + 1):
            if place < len(ids):
                self._prompt.append(logprobs_of(row, ids[place], num_top))
            else:
                self._logits = row.copy()

    def add(self, token: Token) -> Piece | None:
        """Adds a token, and returns what is known now, for `tell`; None if nobody waits for it. `ended` may be set."""
        if self.cancelled:
            self.ended = self.was_left = True
            return None
        if self._error is not None:
            return self.failed(self._error)
        try:
            piece = self._piece(token)
        except ColdpressError as error:  # the tokenizer failed: the other sequences go on
            return self.failed(error)
        self.ended = piece.finish is not None
        return piece

    def failed(self, error: ColdpressError) -> Piece:
        """Ends the sequence with an error, and returns its last piece, for `tell`."""
        self.ended = True
        return Piece(num_new=self._num_new, error=error)

    def _piece(self, token: Token) -> Piece:
        prompt = tuple(self._prompt)
        self._prompt.clear()
        if not self.wanted.max_new_tokens:
            return Piece(prompt=prompt, finish="length")
        self._num_new += 1
        text = self._text.add(token.id) if self._text else ""
        stop = self._text.stop if self._text else None
        finish: Finish | None = None
        if stop is not None or token.id in self._eos_ids:
            finish = "stop"
        elif self._num_new == self.wanted.max_new_tokens:
            finish = "length"
        if finish and self._text:
            text += self._text.remainder()
        tokens = () if self.wanted.num_top is None else (logprobs_of(self._logits, token.id, self.wanted.num_top),)
        return Piece(text, self._num_new, prompt, tokens, finish, stop)
