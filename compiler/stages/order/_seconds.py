"""Models what an order costs: flash seconds of a token, after page rounding and access collapse (Ripple 5.1).

`order` needs the seconds of thousands of tokens under many gaps for each order that it tries, so this is a compiled
form of compiler/seconds.py, for units in a section that begins on a page; tests/compiler/test_order_cost.py checks
that the two agree. It leaves out the bound on the length of one read, which adds a read per 512 KiB, and the limit of
the read buffer: it assumes that each half holds a longest read. Seconds are coldpress.schemas.device.flash_seconds for
each token of each layer.

In a group of layers a unit holds a part for each of them, `[unit][layer][slice]`. Every layer reads its own parts,
which lie a whole unit apart, and the layers follow each other: their seconds add up.
"""

from typing import NamedTuple

import numpy as np

from coldpress.compiler.compiled import compiled, trailing_zeros
from coldpress.compiler.stages.order._coactivation import to_words
from coldpress.schemas.device import Flash, flash_seconds


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
        words = to_words(part)
        reads = np.zeros((64 * words.shape[1], gaps.size), np.int64)
        read_bytes = np.zeros_like(reads)
        where = (unit_bytes, num_layers * unit_bytes, layer * unit_bytes, flash.page_bytes.value)
        _count_reads(words, order.astype(np.int64), where, gaps, reads, read_bytes)
        seconds = flash_seconds(flash, reads[:num_tokens], read_bytes[:num_tokens])
        totals += [found.mean(axis=0) for found in (seconds, reads[:num_tokens], read_bytes[:num_tokens])]
    return [Modelled(float(s), float(r), float(b), gap) for s, r, b, gap in zip(*totals, gaps.tolist(), strict=True)]


def least_seconds(bits: np.ndarray, num_tokens: int, unit_bytes: int, flash: Flash, num_layers: int = 1) -> float:
    """Returns a lower bound for all orders and gaps: each layer's parts in one read. Arguments as in `modelled`."""
    page_bytes = flash.page_bytes.value
    total = 0.0
    for part in np.split(bits, num_layers, axis=1):
        wanted = np.unpackbits(part, axis=1, count=num_tokens, bitorder="little").sum(axis=0, dtype=np.int64)
        read_bytes = -(-wanted * unit_bytes // page_bytes) * page_bytes
        total += float(flash_seconds(flash, np.minimum(wanted, 1), read_bytes).mean())
    return total


@compiled
def _count_reads(words, order, where, gaps, reads, read_bytes):
    """Adds up each token's reads and bytes, [64 * num_words, num_gaps], along the order, 64 tokens at a time. `where`:
    bytes of a part, the stride from part to part, the offset of the first part, and the page size."""
    part_bytes, stride_bytes, offset_bytes, page_bytes = where
    ends = np.empty(64, np.int64)
    for w in range(words.shape[1]):
        ends[:] = -1
        for place in range(order.size):
            word = words[order[place], w]
            first = offset_bytes + place * stride_bytes
            start = first // page_bytes * page_bytes
            end = (first + part_bytes + page_bytes - 1) // page_bytes * page_bytes
            while word:
                bit = trailing_zeros(word)
                word &= word - np.uint64(1)
                _add(ends, bit, start, end, gaps, reads[64 * w + bit], read_bytes[64 * w + bit])


@compiled
def _add(ends, bit, start, end, gaps, reads, read_bytes):
    """Adds one more unit of a token: it joins the read before it or begins another, depending on the gap."""
    before = ends[bit]
    ends[bit] = end
    for g in range(gaps.size):
        if before < 0 or start - before > gaps[g]:
            reads[g] += 1
            read_bytes[g] += end - start
        else:
            read_bytes[g] += end - before
