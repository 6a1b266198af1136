"""Finds which activations cost a read: those of units that are neither pinned nor in the plan's dynamic cache. Replays
calibration tokens through the runtime's own cache policy (runtime/cache), in the order of the text."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from coldpress.runtime.cache import Known, make

TOKENS_AT_A_TIME = 512


def read_bits(
    bits: np.ndarray,
    num_tokens: int,
    pinned: np.ndarray,
    cache: str,
    cache_slots: int,
    options: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Returns the activations that are read from flash, packed like `bits`: uint8 [num_units, ceil(num_tokens / 8)].

    Args:
        bits: Packed activations (schemas/activations.py).
        pinned: bool [num_units], always in DRAM.
        cache: A file of runtime/cache.
        cache_slots: Units that the cache holds beside the pinned ones; it starts empty.
        options: The policy's options. A policy that uses flash positions gets unit ids instead, since the order is not
            known yet.
    """
    found = bits.copy()
    found[pinned] = 0
    known = Known(len(bits), cache_slots, np.flatnonzero(pinned), np.arange(len(bits)))
    if not cache_slots or not (state := make(cache, options or {}, known)).admits:
        return found
    for start in range(0, num_tokens, TOKENS_AT_A_TIME):
        stop = min(num_tokens, start + TOKENS_AT_A_TIME)
        active = np.unpackbits(bits[:, start // 8 : -(-stop // 8)], axis=1, bitorder="little").view(bool).T.copy()
        for token in range(stop - start):
            ids = np.flatnonzero(active[token])
            active[token, ids[state.serve(ids)]] = False
        found[:, start // 8 : -(-stop // 8)] = np.packbits(active.T, axis=1, bitorder="little")
    return found
