"""Statistics of packed activation bits (schemas/activations.py), and which calibration tokens are held out."""

from collections.abc import Sequence

import numpy as np

from coldpress.schemas.activations import Activations, FamilyStatistics
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FamilyName

CHUNK_ROWS = 1024
TAIL_SHARE = 0.25
"""Share of the tokens that is held out: the last quarter of the text."""


def counted(activations: Activations, layer: int, family: FamilyName) -> FamilyStatistics:
    """Returns the statistics of a family, with bits and counts; raises ColdpressError if the family has none."""
    found = activations.layers[layer].family(family)
    if found is None or found.density is None:
        raise ColdpressError(
            f"layer {layer}: no activation bits of family {family} in the statistics; "
            "delete calibrate.json and recalibrate.json from the build folder and build again"
        )
    return found


def population(packed: np.ndarray) -> np.ndarray:
    """Counts the set bits of each row of uint8 [n, num_bytes]: int64 [n]."""
    return np.bitwise_count(packed).sum(axis=1, dtype=np.int64)


def unpacked(packed: np.ndarray, num_tokens: int) -> np.ndarray:
    """Returns bool [n, num_tokens] from packed bits uint8 [n, ceil(num_tokens / 8)]."""
    return np.unpackbits(packed, axis=1, count=num_tokens, bitorder="little").view(bool)


def joined(parts: Sequence[np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """Joins packed bits uint8 [num_units, ceil(T / 8)] of consecutive texts of so many `tokens`, without padding."""
    if all(count % 8 == 0 for count in tokens[:-1]):
        return np.concatenate(parts, axis=1)
    units = len(parts[0])
    found = np.empty((units, -(-sum(tokens) // 8)), np.uint8)
    for start in range(0, units, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        active = [unpacked(part[rows], count) for part, count in zip(parts, tokens, strict=True)]
        found[rows] = np.packbits(np.concatenate(active, axis=1), axis=1, bitorder="little")
    return found


def adjacent_share(packed: np.ndarray) -> float:
    """uint8 [num_units, num_bytes] -> the share of set bits that are also set in the row before or after, [0, 1]."""
    together = packed[:-1] & packed[1:]
    beside = np.zeros_like(packed)
    beside[1:] |= together
    beside[:-1] |= together
    total = int(population(packed).sum())
    return int(population(beside).sum()) / total if total else 0.0


def num_before(num_tokens: int) -> int:
    """Returns the number of tokens that choices are made from; at least one token is held out."""
    return num_tokens - max(1, int(num_tokens * TAIL_SHARE))
