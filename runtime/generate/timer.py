"""Measures the seconds of a run: prefill, decoding, and until the first token; the caller's time does not count."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.store.counters import Counters
from coldpress.runtime.store.store import Store
from coldpress.schemas.metrics import RunMetrics


class Timer:
    """Adds up the seconds of the steps of one run, and remembers the cost of the last step."""

    def __init__(self, started_s: float, counters: Counters) -> None:
        """`counters` are the store's for this run."""
        self._started_s, self._counters = started_s, counters
        self._first_token_s: float | None = None
        self._prefill_s = self._decode_s = 0.0
        self._num_decoded = self._num_passes = 0
        self._last, self._decoding = Token(id=-1), False

    @contextmanager
    def prefill(self) -> Generator[None]:
        """Measures a prefill."""
        start, before = time.perf_counter(), replace(self._counters)
        yield
        stop, after, self._decoding = time.perf_counter(), self._counters, False
        self._prefill_s += stop - start
        if self._first_token_s is None:
            self._first_token_s = stop - self._started_s
        self._last = Token(
            id=-1,
            seconds=stop - start,
            flash_s=after.prefill_flash_s - before.prefill_flash_s,
            reads=after.prefill_reads - before.prefill_reads,
            read_bytes=after.prefill_read_bytes - before.prefill_read_bytes,
        )

    @contextmanager
    def decode(self, num_tokens: int = 1) -> Generator[None]:
        """Measures a pass that decodes `num_tokens`."""
        start, before = time.perf_counter(), replace(self._counters)
        yield
        seconds, after, self._decoding = time.perf_counter() - start, self._counters, True
        self._decode_s += seconds
        self._num_decoded += num_tokens
        self._num_passes += 1
        self._last = Token(
            id=-1,
            seconds=seconds,
            flash_s=after.flash_s - before.flash_s,
            reads=after.reads - before.reads,
            read_bytes=after.read_bytes - before.read_bytes,
            hits=after.hits - before.hits,
            misses=after.misses - before.misses,
        )

    def tokens(self, token_ids: Sequence[int], drafted: int = 0) -> Iterator[Token]:
        """Yields the tokens of the last step: the first with the step's cost, the others with none.

        Args:
            token_ids: Consecutive tokens of one sequence, or one token of each of several sequences.
            drafted: Drafts that the step checked; if any, all tokens but the last were drafts.
        """
        num_accepted = len(token_ids) - 1 if drafted else 0
        for place, token_id in enumerate(token_ids):
            token = Token(id=token_id) if place else replace(self._last, id=token_id, drafted=drafted)
            self._num_decoded += self._decoding and place > 0
            yield replace(token, pass_number=self._num_passes if self._decoding else 0, accepted=place < num_accepted)

    def decoded(self) -> tuple[int, float]:
        """Returns (tokens decoded so far, their seconds)."""
        return self._num_decoded, self._decode_s

    def metrics(self, store: Store) -> RunMetrics:
        """Returns the metrics of the run so far."""
        first_token_s = self._first_token_s or 0.0
        return store.metrics(self._num_decoded, self._decode_s, self._prefill_s, first_token_s, self._num_passes)
