"""Measures the cost of each new token, and how costs spread: 5th percentile, median, 95th percentile.

The time that the caller takes between tokens does not count.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import numpy as np

from coldpress.runtime.store.counters import Counters
from coldpress.runtime.store.store import Store
from coldpress.schemas.metrics import RunMetrics, share_of_hits


@dataclass(frozen=True)
class Token:
    """A new token and its cost. The first token carries the dense prefill's cost; the prefill makes no cache lookups.

    If one pass gave several tokens (runtime/generate/speculation.py), the first carries the cost of the pass, and the
    others have zeros.
    """

    id: int
    seconds: float = 0.0
    """From the previous token to the choice of this one, drafts included; the caller's time between does not count."""
    flash_s: float = 0.0
    """The part of `seconds` spent waiting for flash; with simulated flash, the modelled device's seconds."""
    reads: int = 0
    read_bytes: int = 0
    """Bytes moved from flash, pages included."""
    hits: int = 0
    misses: int = 0
    pass_number: int = 0
    """The pass through the layers that gave the token; 0 is the prefill."""
    drafted: int = 0
    """Drafts of its sequence that the pass checked; only the first token of a sequence and pass has them."""
    accepted: bool = False
    """True for a token that was a draft."""

    @property
    def leads(self) -> bool:
        """Returns whether the token is the first of its pass, which carries the cost."""
        return self.seconds > 0

    @property
    def hit_rate(self) -> float:
        return share_of_hits(self.hits, self.misses)


@dataclass(frozen=True)
class Spread:
    """The spread of a figure from token to token; percentiles are interpolated linearly."""

    p5: float
    median: float
    p95: float


@dataclass(frozen=True)
class TokenSpreads:
    seconds: Spread
    flash_s: Spread
    reads: Spread
    read_bytes: Spread
    hit_rate: Spread


@dataclass(frozen=True)
class Drafted:
    passes: int
    """Passes through the layers, without the prefill."""
    drafted: int
    accepted: int
    acceptance: float
    """Accepted drafts over drafts; 0 without drafts."""
    tokens_per_pass: float


def drafted(decoded: Sequence[Token]) -> Drafted | None:
    """Counts the drafts of decoded tokens (all but a run's first); returns None without tokens."""
    if not decoded:
        return None
    passes = sum(token.leads for token in decoded)
    num_drafted, num_accepted = sum(token.drafted for token in decoded), sum(token.accepted for token in decoded)
    share = num_accepted / num_drafted if num_drafted else 0.0
    return Drafted(passes, num_drafted, num_accepted, share, len(decoded) / passes)


def spreads(decoded: Sequence[Token]) -> TokenSpreads | None:
    """Computes the spreads of decoded tokens (all but a run's first); returns None without tokens. Tokens of one pass
    count once, with the cost of the pass."""
    if not decoded:
        return None
    leading = [token for token in decoded if token.leads]

    def spread(name: str) -> Spread:
        p5, median, p95 = np.percentile([getattr(token, name) for token in leading], [5, 50, 95])
        return Spread(float(p5), float(median), float(p95))

    return TokenSpreads(**{figure.name: spread(figure.name) for figure in fields(TokenSpreads)})


class Timer:
    """Adds up the seconds of the steps of one run, and remembers the cost of the last step."""

    def __init__(self, started_s: float, counters: Counters) -> None:
        self._started_s, self._counters = started_s, counters
        self._first_token_s: float | None = None
        self._prefill_s = self._decode_s = 0.0
        self._num_decoded = self._num_passes = 0
        self.last = Token(id=-1)
        """The cost of the last step, without a token."""

    @contextmanager
    def prefill(self) -> Generator[None]:
        with self._step(flash_s="prefill_flash_s", reads="prefill_reads", read_bytes="prefill_read_bytes"):
            yield
        self._prefill_s += self.last.seconds
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._started_s

    @contextmanager
    def decode(self, num_tokens: int = 1) -> Generator[None]:
        with self._step(flash_s="flash_s", reads="reads", read_bytes="read_bytes", hits="hits", misses="misses"):
            yield
        self._decode_s += self.last.seconds
        self._num_decoded += num_tokens
        self._num_passes += 1
        self.last = replace(self.last, pass_number=self._num_passes)

    @contextmanager
    def _step(self, **counted: str) -> Generator[None]:
        """Remembers a step's seconds, and by how much counters grew: field of the token -> counter."""
        start, before = time.perf_counter(), replace(self._counters)
        yield
        seconds = time.perf_counter() - start
        grown = {field: getattr(self._counters, name) - getattr(before, name) for field, name in counted.items()}
        self.last = Token(id=-1, seconds=seconds, **grown)

    def tokens(self, token_ids: Sequence[int], drafted: int = 0, *, leads: bool = True) -> Iterator[Token]:
        """Yields the new tokens of one sequence of the last step. If the step checked drafts of it, all tokens but the
        last were drafts.

        Args:
            leads: Whether the first token carries the step's cost; in a batch only that of the first sequence does.
        """
        num_accepted = len(token_ids) - 1 if drafted else 0
        number = self.last.pass_number
        for place, token_id in enumerate(token_ids):
            token = self.last if leads and not place else Token(id=-1, pass_number=number)
            self._num_decoded += number > 0 and not (leads and not place)
            drafts = 0 if place else drafted
            yield replace(token, id=token_id, drafted=drafts, accepted=place < num_accepted)

    def decoded(self) -> tuple[int, float]:
        return self._num_decoded, self._decode_s

    def metrics(self, store: Store) -> RunMetrics:
        first_token_s = self._first_token_s or 0.0
        return store.metrics(self._num_decoded, self._decode_s, self._prefill_s, first_token_s, self._num_passes)
