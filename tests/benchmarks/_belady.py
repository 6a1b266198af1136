"""A bound that no device reaches: the cache that knows all requests to come (Belady 1966, cited by DIP 5.1)."""

from collections.abc import Sequence

import numpy as np

NEVER = np.iinfo(np.int64).max


def missed(num_units: int, capacity: int, requests: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What is not in the cache when each of `requests`, ids int32 [k] each, comes: ids of each.

    After a request the cache holds those of its units, and of the request's, that are wanted again soonest. So no cache
    of that size has fewer misses; the product's own policies are held to more, to give up nothing that is in use.
    """
    again = _again(num_units, requests)
    following = np.full(num_units, NEVER)
    kept, found = np.zeros(num_units, bool), []
    for ids in requests:
        found.append(ids[~kept[ids]])
        kept[ids] = True
        following[ids] = again.pop()
        kept &= following < NEVER
        candidates = np.flatnonzero(kept)
        kept[candidates[np.argsort(following[candidates], kind="stable")[capacity:]]] = False
    return found


def _again(num_units: int, requests: Sequence[np.ndarray]) -> list[np.ndarray]:
    """When each unit of a request is requested again, int64 [k]; the last request's first."""
    following, found = np.full(num_units, NEVER), []
    for number in range(len(requests) - 1, -1, -1):
        found.append(following[requests[number]])
        following[requests[number]] = number
    return found
