"""Caches of tests and benchmarks, apart from any store."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from coldpress.runtime import plugins
from coldpress.runtime.cache import CachePolicy, Known, make

RUNNABLE = tuple(
    name
    for name in plugins.names("coldpress.runtime.cache")
    if not plugins.load_class("coldpress.runtime.cache", CachePolicy, name).looks_ahead
)
"""Policies that need not know the requests to come."""


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
    """A cache with nothing in it; units lie where their ids say unless `position` says otherwise."""
    places = np.arange(num_units) if position is None else position
    return make(name, options, Known(num_units, capacity, np.array(sorted(pinned), np.int64), places, requests))


def missed(cache: CachePolicy, requests: Iterable[np.ndarray]) -> list[np.ndarray]:
    """What of each token's one request is not in the cache when it comes, ids of each."""
    return [ids[~cache.serve(ids)] for ids in requests]
