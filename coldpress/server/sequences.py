"""One sequence that a client asked for: what is wanted, and the pieces of text that come of it."""

from collections.abc import Callable
from dataclasses import dataclass

from coldpress.runtime.generate.batch import Prompt
from coldpress.runtime.generate.completion import Continuation, Finish, TokenLogprobs
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError


@dataclass(frozen=True)
class Wanted:
    ids: tuple[int, ...]
    """The prompt, at least one token id."""
    sampling: Sampling
    max_new_tokens: int
    """At least 0; 0 only scores the prompt."""
    stops: tuple[str, ...] = ()
    num_top: int | None = None
    """Likeliest tokens to tell in the place of each token; None for no log-probabilities at all."""
    scores_prompt: bool = False
    """True tells the log-probabilities of the prompt's tokens, too."""


@dataclass(frozen=True)
class Piece:
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
    error: ColdpressError | None = None
    """Set in the last piece of a sequence that failed."""


class Sequence(Continuation):
    """A sequence on its way through the worker; its methods are called by the worker's thread."""

    def __init__(
        self, wanted: Wanted, codec: TextCodec | None, eos_ids: frozenset[int], tell: Callable[[Piece], None]
    ) -> None:
        """`tell` is called with each piece, in the worker's thread. Raises as `Continuation`."""
        super().__init__(codec, wanted.ids, wanted.stops, wanted.num_top, eos_ids)
        self.wanted, self.tell = wanted, tell
        self._error: ColdpressError | None = None
        self.ended = self.was_left = False
        self.cancelled = False
        """Nobody waits for the rest: the sequence ends at its next token or prefill pass."""

    def asked(self) -> Prompt:
        wanted = self.wanted
        return self.prompt(
            wanted.sampling,
            max_new_tokens=max(wanted.max_new_tokens, 1),
            scores_prompt=wanted.scores_prompt and wanted.num_top is not None,
            is_left=lambda: self.cancelled,
            on_error=self._note,
        )

    def _note(self, error: ColdpressError) -> None:
        self._error = error

    def take(self, token: Token) -> Piece | None:
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
        return Piece(num_new=len(self.token_ids), error=error)

    def _piece(self, token: Token) -> Piece:
        prompt, self.prompt_logprobs = tuple(self.prompt_logprobs), list[TokenLogprobs]()
        if not self.wanted.max_new_tokens:
            return Piece(prompt=prompt, finish="length")
        self.add(token)
        num_new = len(self.token_ids)
        is_full = num_new == self.wanted.max_new_tokens
        finish: Finish | None = "stop" if self.has_stopped else "length" if is_full else None
        text = self.piece + (self.remainder() if finish else "")
        return Piece(text, num_new, prompt, tuple(self.logprobs[-1:]), finish, self.stop)
