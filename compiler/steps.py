"""Tells in a stage's log how far it is and how long it will still take, now and then; a build shows the last such line
(compiler/workflow/progress.py)."""

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)
EVERY_S = 5.0
"""Seconds between two lines, so that short stages write none."""


class Steps:
    """Counts the equal steps of a long stage; several threads may count."""

    def __init__(self, title: str, total: int, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins at step 0. `title` is the stage, and a part of it where it has several, as "verify, source"."""
        self._title, self._total, self._unit, self._clock = title, total, unit, clock
        self._lock, self._done = threading.Lock(), 0
        self._start_s = self._told_s = clock()

    def expect(self, count: int) -> None:
        with self._lock:
            self._total += count

    def add(self, count: int = 1) -> None:
        with self._lock:
            self._done += count
            now_s = self._clock()
            if now_s - self._told_s < EVERY_S or self._done >= self._total:
                return
            self._told_s = now_s
            left_s = (now_s - self._start_s) / self._done * (self._total - self._done)
            log.info("%s: %d of %d %s, about %s left", self._title, self._done, self._total, self._unit, _words(left_s))


def _words(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"
