"""Makes caches for tests and benchmarks, without a store."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from coldpress.runtime import plugins
from coldpress.runtime.cache import CacheFacts, CachePolicy, make

RUNNABLE = tuple(
    name
    for name in plugins.names("coldpress.runtime.cache")
    if not plugins.load_class("coldpress.runtime.cache", CachePolicy, name).looks_ahead
)
"""Policies that need not know future requests."""


def empty(
    name: str,
    num_units: int,
    capacity: int,
    pinned: Iterable[int] = (),
    *,
    position: np.ndarray | None = None,
    requests: Sequence[np.ndarray] | None = None,
    **options: Any,
) -> CachePolicy:
    """Returns an empty cache; unit i lies at position i unless `position` says otherwise."""
    places = np.arange(num_units) if position is None else position
    return make(name, options, CacheFacts(num_units, capacity, np.array(sorted(pinned), np.int64), places, requests))


def missed(cache: CachePolicy, requests: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Serves the requests in order, one per token, and returns the ids that each of them misses."""
    return [ids[~cache.serve(ids)] for ids in requests]
