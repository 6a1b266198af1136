"""Linking-aligned admission over another policy (Ripple 5.2): admits scattered units as usual, and runs less often.

A run is `linked_run` or more units of one request that are adjacent on flash. Caching a run takes much room and saves a
single read, and after a part of it is evicted, its units are read in pieces. So if a run needs evictions, it is
admitted, as a whole, with the probability `linked_admission`. If there is free room, every unit is admitted. The base
policy chooses which units to evict.
"""

from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from coldpress.runtime import plugins as _plugins
from coldpress.runtime.cache._policy import NOTHING, CacheFacts, CachePolicy
from coldpress.schemas.base import Count, Record, Share
from coldpress.schemas.config import Key


def _bases() -> list[str]:
    others = [name for name in _plugins.names("coldpress.runtime.cache") if name != "linked"]
    found = {name: _plugins.load_class("coldpress.runtime.cache", CachePolicy, name) for name in others}
    return [name for name, cache in found.items() if cache.admits and not cache.looks_ahead]


def _base(name: str) -> str:
    if name not in _bases():
        raise ValueError("is no policy to build upon")
    return name


class Options(Record):
    linked_over: Annotated[str, AfterValidator(_base), Key(plugins="coldpress.runtime.cache")] = Field(
        default="lru", description="the policy that says what goes, one that admits units and knows no future"
    )
    linked_run: int = Field(default=4, ge=2, description="units side by side on flash from which on they are a run")
    linked_admission: Share = Field(
        default=0.5, description="probability that a run comes in where something has to go for it"
    )
    linked_seed: Count = Field(default=0, description="what is drawn derives from it")


class Plugin(CachePolicy):
    OPTIONS = Options

    def __init__(self, known: CacheFacts, options: Options) -> None:
        """Does not call `super().__init__`, since the base policy records the cached units."""
        plugin = _plugins.load_class("coldpress.runtime.cache", CachePolicy, options.linked_over)
        self._base = plugin(known, _plugins.options_of(plugin, {}))
        self._position, self._options = known.position, options
        self._random = np.random.default_rng(options.linked_seed)
        self._requested = NOTHING

    @classmethod
    def kept_bytes(cls, num_units: int) -> int:
        """Returns as many as the base policy that stores most."""
        caches = (_plugins.load_class("coldpress.runtime.cache", CachePolicy, name) for name in _bases())
        return max(cache.kept_bytes(num_units) for cache in caches)

    @property
    def present(self) -> np.ndarray:
        return self._base.present

    def contains(self, ids: np.ndarray) -> np.ndarray:
        return self._base.contains(ids)

    def touch(self, ids: np.ndarray) -> np.ndarray:
        self._requested = ids
        return self._base.touch(ids)

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not ids.size:
            return self._base.admit(ids)
        refused = self._draw()[np.searchsorted(self._requested, ids)]
        # Units of refused runs still fill free room, because nothing is evicted for them.
        room = max(0, self._base.num_free - int(np.count_nonzero(~refused)))
        refused[np.flatnonzero(refused)[:room]] = False
        return self._base.admit(ids[~refused])

    def _draw(self) -> np.ndarray:
        """Draws which runs are refused; returns bool [k]: which units of the current request belong to such a run. Runs
        are found in the whole request, hits included."""
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
        self._base.drop(ids)

    def end_tokens(self, count: int = 1) -> np.ndarray:
        return self._base.end_tokens(count)

    def resize(self, capacity: int, pinned: np.ndarray) -> None:
        self._base.resize(capacity, pinned)

    def unpin(self, ids: np.ndarray) -> None:
        self._base.unpin(ids)

    def reset(self) -> None:
        self._base.reset()
