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

from coldpress.runtime.cache._policy import NOTHING, CachePolicy, Known
from coldpress.schemas.base import PositiveCount, Record

MOST_LISTED = 2
"""Bound on the ids that a long window lists, as a multiple of the family's units. At least half the ids of a list this
long were also used by newer tokens, so that cleaning it up always makes room."""


class Options(Record):
    """The window's length."""

    window_tokens: PositiveCount = Field(default=5, description="tokens whose units stay, where they fit")


class Plugin(CachePolicy):
    """Evicts by tokens."""

    OPTIONS = Options

    def __init__(self, known: Known, options: Options) -> None:
        """See `CachePolicy`."""
        super().__init__(known, options)
        self._length = options.window_tokens
        self._num_tokens = 0
        self._last_token = np.zeros(known.num_units, np.int32)
        """Number of the newest token that used each unit, counted from 1; the current token has the next number."""
        self._current: list[np.ndarray] = []
        self._window: deque[tuple[int, np.ndarray]] = deque()
        """Number of each token and the ids that it used, oldest first. Ids that newer tokens used may be left out."""
        self._num_listed, self._most_listed = 0, MOST_LISTED * known.num_units

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Notes the units that the token uses; see `CachePolicy`."""
        self._last_token[ids] = self._num_tokens + 1
        self._current.append(ids)
        return super().touch(ids)

    def end_tokens(self, count: int = 1) -> np.ndarray:
        """Moves the window on; see `CachePolicy`."""
        self._num_tokens += count
        used = self._current[0] if len(self._current) == 1 else np.unique(np.concatenate([NOTHING, *self._current]))
        self._last_token[used] = self._num_tokens
        if self._num_listed + used.size > self._most_listed:
            self._window = deque((token, self._still(token, listed)) for token, listed in self._window)
            self._num_listed = sum(listed.size for _, listed in self._window)
        self._window.append((self._num_tokens, used))
        self._num_listed += used.size
        self._current = []
        gone = [NOTHING]
        while self._window[0][0] <= self._num_tokens - self._length:
            gone.append(self._leaves())
        evicted = np.concatenate(gone)
        self.num_free += evicted.size
        return evicted

    def _victims(self, candidates: np.ndarray) -> np.ndarray:
        found, missing = [NOTHING], candidates.size
        while missing > 0 and self._window:
            found.append(self._leaves())
            missing -= found[-1].size
        return np.concatenate(found)

    def _leaves(self) -> np.ndarray:
        """Removes the oldest token; returns its units that no newer token used."""
        token, used = self._window.popleft()
        self._num_listed -= used.size
        gone = self._still(token, used)
        self._cached[gone] = False
        return gone

    def _still(self, token: int, used: np.ndarray) -> np.ndarray:
        """Returns the units of a token that are cached and that no newer token used."""
        return used[self._cached[used] & (self._last_token[used] == token)]
