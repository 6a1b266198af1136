"""Linking-aligned admission over another policy: what lies apart on flash comes in as usual, runs less often.

Ripple 5.2. A run is `linked_run` or more units of one request whose places on flash follow each other. It takes much
room, saves one read, and when a part of it is given up the rest is read in pieces, so where something would have to go
for it, it comes in with the probability `linked_admission`, whole or not at all. Where there is room, everything comes
in. What goes is the base policy's choice.
"""

from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from coldpress.runtime import plugins as _plugins
from coldpress.runtime.cache._policy import NOTHING, Known, Policy
from coldpress.schemas.base import Count, Record, Share
from coldpress.schemas.config import Key


def _base(name: str) -> str:
    if name == "linked" or name not in _plugins.names("coldpress.runtime.cache"):
        raise ValueError("is no policy to build upon")
    cache = _plugins.load("coldpress.runtime.cache", name).Cache
    if not cache.admits or cache.looks_ahead:
        raise ValueError("is no policy to build upon")
    return name


class Options(Record):
    """The base policy, what a run is, and how often one comes in."""

    linked_over: Annotated[str, AfterValidator(_base), Key(plugins="coldpress.runtime.cache")] = Field(
        default="lru", description="the policy that says what goes, one that admits units and knows no future"
    )
    linked_run: int = Field(default=4, ge=2, description="units side by side on flash from which on they are a run")
    linked_admission: Share = Field(
        default=0.5, description="probability that a run comes in where something has to go for it"
    )
    linked_seed: Count = Field(default=0, description="what is drawn derives from it")


class Cache(Policy):
    """Ids in, ids out; see `Policy`."""

    def __init__(self, known: Known, options: Options) -> None:
        """See `Policy`. What is cached is the base policy's to know, so nothing of this class's own is set up."""
        plugin = _plugins.load("coldpress.runtime.cache", options.linked_over)
        self._base: Policy = plugin.Cache(known, _plugins.options_of(plugin, {}))
        self._position, self._options = known.position, options
        self._random = np.random.default_rng(options.linked_seed)
        self._requested = NOTHING

    @property
    def present(self) -> np.ndarray:
        """See `Policy`."""
        return self._base.present

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """See `Policy`."""
        return self._base.contains(ids)

    def touch(self, ids: np.ndarray) -> np.ndarray:
        """See `Policy`."""
        self._requested = ids
        return self._base.touch(ids)

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Policy`."""
        if not ids.size:
            return self._base.admit(ids)
        refused = self._draw()[np.searchsorted(self._requested, ids)]
        room = max(0, self._base.num_free - int(np.count_nonzero(~refused)))
        refused[np.flatnonzero(refused)[:room]] = False
        return self._base.admit(ids[~refused])

    def _draw(self) -> np.ndarray:
        """bool [k]: which units of the current request belong to a run that does not come in."""
        places = self._position[self._requested]
        along = np.argsort(places)
        begins = np.diff(places[along], prepend=-2) > 1
        run = np.cumsum(begins) - 1
        is_long = np.bincount(run) >= self._options.linked_run
        is_refused = is_long & (self._random.random(is_long.size) >= self._options.linked_admission)
        refused = np.empty(places.size, bool)
        refused[along] = is_refused[run]
        return refused

    def drop(self, ids: np.ndarray) -> None:
        """See `Policy`."""
        self._base.drop(ids)

    def end_tokens(self, count: int = 1) -> np.ndarray:
        """See `Policy`."""
        return self._base.end_tokens(count)

    def resize(self, capacity: int, pinned: np.ndarray) -> None:
        """See `Policy`."""
        self._base.resize(capacity, pinned)

    def unpin(self, ids: np.ndarray) -> None:
        """See `Policy`."""
        self._base.unpin(ids)

    def reset(self) -> None:
        """See `Policy`."""
        self._base.reset()
