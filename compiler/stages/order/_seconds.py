"""Models what an order costs: flash seconds of a token, after page rounding and access collapse (Ripple 5.1).

`order` needs the seconds of thousands of tokens under many gaps for each order that it tries, so this is a short form
of compiler/seconds.py, for units in a section that begins on a page; tests/compiler/test_order_cost.py checks that the
two agree. The runtime's planner counts the reads. Left out are the bound on the length of one read, which adds a read
per 512 KiB, and the limit of the read buffer: it is assumed that each half holds a longest read. Seconds are
coldpress.schemas.device.flash_seconds for each token of each layer.

In a group of layers a unit holds a part for each of them, `[unit][layer][slice]`. Every layer reads its own parts,
which lie a whole unit apart, and the layers follow each other: their seconds add up.
"""

from typing import NamedTuple

import numpy as np

from coldpress.runtime.store.planner import Strided, count_reads
from coldpress.schemas.device import Flash, flash_seconds

TOKENS_AT_A_TIME = 512
"""Tokens whose bits are unpacked together; a multiple of eight."""


class Modelled(NamedTuple):
    """Means per token under one collapse gap, summed over the layers of a group."""

    seconds: float
    reads: float
    read_bytes: float
    gap_bytes: int


def gap_candidates(flash: Flash) -> np.ndarray:
    """Returns collapse gaps worth trying, int64 bytes, ascending: whole pages around the break-even gap."""
    page_bytes = flash.page_bytes.value
    pages = flash.break_even_gap_bytes * 2.0 ** (np.arange(-10, 6) / 2) // page_bytes
    return np.unique(np.append(pages.astype(np.int64), 0)) * page_bytes


def modelled(
    bits: np.ndarray,
    num_tokens: int,
    order: np.ndarray,
    unit_bytes: int,
    flash: Flash,
    gaps: np.ndarray,
    num_layers: int = 1,
) -> list[Modelled]:
    """Returns the cost of reading `bits` in an order, for each of `gaps`.

    Args:
        bits: uint8 [num_units, num_layers * ceil(num_tokens / 8)], packed activations that cause a flash read.
        num_tokens: Tokens in the bits of a layer.
        order: Unit ids by flash position.
        unit_bytes: Bytes of one layer's part of a unit.
        gaps: int64 bytes, ascending.
        num_layers: Layers of the group, side by side in `bits`.
    """
    totals = np.zeros((3, gaps.size))
    for layer, part in enumerate(np.split(bits, num_layers, axis=1)):
        units = Strided(layer * unit_bytes, unit_bytes, num_layers * unit_bytes)
        reads, read_bytes = _counted(part, num_tokens, order, units, flash.page_bytes.value, gaps)
        totals += [found.mean(axis=0) for found in (flash_seconds(flash, reads, read_bytes), reads, read_bytes)]
    return [Modelled(float(s), float(r), float(b), gap) for s, r, b, gap in zip(*totals, gaps.tolist(), strict=True)]


def _counted(
    bits: np.ndarray, num_tokens: int, order: np.ndarray, units: Strided, page_bytes: int, gaps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns each token's reads and their bytes, int64 [num_tokens, num_gaps]."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for start in range(0, num_tokens, TOKENS_AT_A_TIME):
        count = min(TOKENS_AT_A_TIME, num_tokens - start)
        some = bits[order, start // 8 : -(-(start + count) // 8)]
        tokens, positions = np.unpackbits(some, axis=1, count=count, bitorder="little").T.nonzero()
        stops = np.bincount(tokens, minlength=count).cumsum()
        found.append(count_reads(units, np.ascontiguousarray(positions), stops, page_bytes, gaps))
    reads, read_bytes = zip(*found, strict=True)
    return np.concatenate(reads), np.concatenate(read_bytes)


def least_seconds(bits: np.ndarray, num_tokens: int, unit_bytes: int, flash: Flash, num_layers: int = 1) -> float:
    """Returns a lower bound for all orders and gaps: each layer's parts in one read. Arguments as in `modelled`."""
    page_bytes = flash.page_bytes.value
    total = 0.0
    for part in np.split(bits, num_layers, axis=1):
        wanted = np.unpackbits(part, axis=1, count=num_tokens, bitorder="little").sum(axis=0, dtype=np.int64)
        read_bytes = -(-wanted * unit_bytes // page_bytes) * page_bytes
        total += float(flash_seconds(flash, np.minimum(wanted, 1), read_bytes).mean())
    return total
