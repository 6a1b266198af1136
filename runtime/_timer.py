"""Seconds of a run: of the prefill, of decoding, and to the first token; what a caller does between does not count."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.store import Store
from schemas.metrics import RunMetrics


class Timer:
    """Adds up the seconds of the steps of one run."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._first_token_s: float | None = None
        self._prefill_s = self._decode_s = 0.0
        self._num_decoded = 0

    @contextmanager
    def prefill(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        stop = time.perf_counter()
        self._prefill_s += stop - start
        if self._first_token_s is None:
            self._first_token_s = stop - self._started_s

    @contextmanager
    def decode(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._decode_s += time.perf_counter() - start
        self._num_decoded += 1

    def metrics(self, store: Store) -> RunMetrics:
        return store.metrics(self._num_decoded, self._decode_s, self._prefill_s, self._first_token_s or 0.0)
