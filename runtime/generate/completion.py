"""Collects the continuation of a prompt: tokens, their text up to a stop string, log-probabilities, and their cost.

The command line, the Python interface and the server print or send it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from coldpress.runtime.generate.batch import Prompt
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.text.stream import TextStream
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import share_of_hits

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities of a token, and of the likeliest ones in its place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log-probability) of the likeliest tokens, likeliest first, the lower id first among equals."""


def logprobs_of(logits: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """Returns the log-probabilities of `token_id` and of the `num_top` likeliest tokens in logits [vocab_size]."""
    below = logits.astype(np.float64) - logits.max()  # so that exp cannot overflow
    logprobs = below - np.log(np.exp(below).sum())
    num_top = min(num_top, logprobs.size)
    likeliest = np.argpartition(-logprobs, num_top - 1)[:num_top] if num_top else np.empty(0, np.int64)
    if num_top:  # of several that are as likely as the last one, those with the lowest ids
        likeliest = np.flatnonzero(logprobs >= logprobs[likeliest].min())
    likeliest = likeliest[np.argsort(-logprobs[likeliest], kind="stable")][:num_top]
    return TokenLogprobs(
        token_id, float(logprobs[token_id]), tuple((int(token), float(logprobs[token])) for token in likeliest)
    )


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt; `str()` gives its text."""

    text: str
    """Without the prompt, without a stop string and what follows it; empty for an artifact without a tokenizer."""
    token_ids: tuple[int, ...]
    """The new tokens; one that ended the text is the last."""
    prompt_token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    """`stop` at a stop string or an end-of-sequence token, `length` at `max_new_tokens`."""
    stop: str | None
    """The stop string that was found."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """One for each new token; None if they were not asked for."""

    def __str__(self) -> str:
        return self.text


class Continuation:
    def __init__(
        self,
        codec: TextCodec | None,
        ids: Sequence[int],
        stops: Sequence[str] = (),
        num_top: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Begins after the prompt `ids`, at least one token id.

        Args:
            codec: None without a tokenizer.
            stops: Texts before which the continuation ends.
            num_top: Likeliest tokens to list in the place of each token; None for no log-probabilities.
            eos_ids: Tokens that end the text.

        Raises:
            ColdpressError: for stop strings without a tokenizer, or an empty one.
        """
        if codec is None and stops:
            raise ColdpressError("stop strings need a tokenizer, and the artifact has none; leave them out")
        self.ids, self.num_top, self._eos_ids = ids, num_top, eos_ids
        self._text = TextStream(codec, ids, stops) if codec else None
        self.token_ids, self.piece = list[int](), ""
        """`piece` is the text that has become certain with the last token."""
        self.prompt_logprobs, self.logprobs = list[TokenLogprobs](), list[TokenLogprobs]()
        """`prompt_logprobs`: one for each token of a scored prompt but the first; `logprobs`: one for each new one."""
        self._logits = np.empty(0, np.float32)

    def prompt(self, sampling: Sampling, **settings: Any) -> Prompt:
        return Prompt(self.ids, sampling, on_logits=None if self.num_top is None else self._see, **settings)

    def _see(self, position: int, logits: np.ndarray) -> None:
        for place, row in enumerate(logits, start=position + 1):
            if place < len(self.ids):
                self.prompt_logprobs.append(logprobs_of(row, self.ids[place], self.num_top or 0))
            else:
                self._logits = row.copy()

    def add(self, token: Token) -> bool:
        self.token_ids.append(token.id)
        if self.num_top is not None:
            self.logprobs.append(logprobs_of(self._logits, token.id, self.num_top))
        self.piece = self._text.add(token.id) if self._text else ""
        return self.stop is not None

    @property
    def stop(self) -> str | None:
        return self._text.stop if self._text else None

    @property
    def has_stopped(self) -> bool:
        return self.stop is not None or self.token_ids[-1] in self._eos_ids

    def remainder(self) -> str:
        return self._text.remainder() if self._text else ""

    def completion(self) -> Completion:
        return Completion(
            text=self._text.text() if self._text else "",
            token_ids=tuple(self.token_ids),
            prompt_token_ids=tuple(self.ids),
            finish_reason="stop" if self.has_stopped else "length",
            stop=self.stop,
            logprobs=None if self.num_top is None else tuple(self.logprobs),
        )

    def as_data(self) -> dict[str, Any]:
        """Returns the result as JSON; its text is None without a tokenizer."""
        return {
            "prompt_token_ids": list(self.ids),
            "token_ids": self.token_ids,
            "text": self._text.text() if self._text else None,
            "stop": self.stop,
        }


@dataclass
class Totals:
    prompt_tokens: int = 0
    new_tokens: int = 0
    decoded: int = 0
    """New tokens without each prompt's first, which comes from the prefill."""
    prefills: int = 0
    passes: int = 0
    """Passes that decoded tokens."""
    drafted: int = 0
    accepted: int = 0
    """Drafts, and those that were right."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    flash_s: float = 0.0
    reads: int = 0
    read_bytes: int = 0
    hits: int = 0
    misses: int = 0

    @property
    def hit_rate(self) -> float:
        return share_of_hits(self.hits, self.misses)

    def add(self, token: Token, num_prompt: int) -> None:
        """Adds a token behind a prompt of `num_prompt` tokens, and its cost: that of its pass, if it is the first."""
        self.new_tokens += 1
        if token.pass_number:
            self.decoded += 1
            self.passes += token.leads
            self.decode_s += token.seconds
        else:
            self.prompt_tokens += num_prompt
            self.prefills += token.leads
            self.prefill_s += token.seconds
        self.drafted += token.drafted
        self.accepted += token.accepted
        self.flash_s += token.flash_s
        self.reads += token.reads
        self.read_bytes += token.read_bytes
        self.hits += token.hits
        self.misses += token.misses
