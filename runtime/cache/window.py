"""Sliding window: what the last tokens used stays, and goes with the last token in the window that used it.

LLM in a flash 3.1. The window has `window_tokens` tokens, and fewer where their units do not fit: whole tokens leave,
the oldest first, until there is room for what the current one misses. A token's units are never given up for others of
the same token. Tokens that are decoded together enter together, as the newest (5.2: the window follows the accepted
tokens). A window that is never full holds no more than a cache of the same size that gives up the least recently used;
what it saves is memory, where something else could use that.
"""

from collections import deque

import numpy as np
from pydantic import Field

from coldpress.runtime.cache._policy import NOTHING, Known, Policy
from coldpress.schemas.base import PositiveCount, Record

MOST_LISTED = 2
"""In units of the family: ids that a long window lists of all its tokens. Half of it is what newer ones did not use."""


class Options(Record):
    """The window's length."""

    window_tokens: PositiveCount = Field(default=5, description="tokens whose units stay, where they fit")


class Cache(Policy):
    """Ids in, ids out; see `Policy`."""

    def __init__(self, known: Known, options: Options) -> None:
        """See `Policy`."""
        super().__init__(known, options)
        self._length = options.window_tokens
        self._num_tokens = 0
        self._last_token = np.zeros(known.num_units, np.int32)
        """The newest token that used each unit, counted from 1; the one that is not over is one more than those."""
        self._current: list[np.ndarray] = []
        self._window: deque[tuple[int, np.ndarray]] = deque()
        """Token and the ids that it used, those that newer ones used left out where there are many; oldest first."""
        self._num_listed, self._most_listed = 0, MOST_LISTED * known.num_units

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """Takes down what the token uses; see `Policy`."""
        self._last_token[ids] = self._num_tokens + 1
        self._current.append(ids)
        return super().touch(ids)

    def end_tokens(self, count: int = 1) -> np.ndarray:
        """The window moves on; see `Policy`."""
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
        """The units that go with the oldest token: none that a newer one has used."""
        token, used = self._window.popleft()
        self._num_listed -= used.size
        gone = self._still(token, used)
        self._cached[gone] = False
        return gone

    def _still(self, token: int, used: np.ndarray) -> np.ndarray:
        """Those of a token's units that are cached, and that no newer one used."""
        return used[self._cached[used] & (self._last_token[used] == token)]
