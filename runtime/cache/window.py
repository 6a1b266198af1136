"""Sliding window: units used by the last tokens stay in DRAM (LLM in a flash 3.1).

The window has `window_tokens` tokens, or fewer if their units do not fit: whole tokens leave, oldest first, until there
is room for the units that the current token misses. A unit leaves with the newest token in the window that used it. A
token's units are never evicted for other units of the same token. Tokens decoded together enter together, as the newest
(5.2: the window follows the accepted tokens). A window that is never full holds no more units than an LRU cache of the
same size would.
"""

from collections import deque

import numpy as np
from pydantic import Field

from coldpress.runtime.cache._policy import NOTHING, CacheFacts, CachePolicy
from coldpress.schemas.base import PositiveCount, Record


class Options(Record):
    window_tokens: PositiveCount = Field(default=5, description="tokens whose units stay, where they fit")


class Plugin(CachePolicy):
    OPTIONS = Options

    def __init__(self, known: CacheFacts, options: Options) -> None:
        super().__init__(known, options)
        self._length = options.window_tokens
        self._num_tokens = 0
        self._window: deque[tuple[int, int]] = deque()
        """Number of each token and of its last request, oldest first. A cached unit is in the window with the token
        that made its last request."""

    @classmethod
    def kept_bytes(cls, num_units: int) -> int:
        """Adds free slots, since all units of a token leave before others come."""
        return 2 * super().kept_bytes(num_units)

    def end_tokens(self, count: int = 1) -> np.ndarray:
        self._num_tokens += count
        self._window.append((self._num_tokens, self._request))
        gone = [NOTHING]
        while self._window[0][0] <= self._num_tokens - self._length:
            gone.append(self._leaves())
        evicted = np.concatenate(gone)
        self.num_free += evicted.size
        return evicted

    def _renumbered(self, before: np.ndarray) -> None:
        self._window = deque((token, int(np.searchsorted(before, last, "right"))) for token, last in self._window)

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        found, missing = [NOTHING], candidates.size
        while missing > 0 and self._window:
            found.append(self._leaves())
            missing -= found[-1].size
        return np.concatenate(found)

    def _leaves(self) -> np.ndarray:
        """Removes the oldest token; returns its units that no newer token used."""
        _, last = self._window.popleft()
        gone = np.flatnonzero(self._between(self._last_request, last + 1))
        self._last_request[gone] = 0
        return gone
