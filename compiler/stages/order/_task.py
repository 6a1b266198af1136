"""Defines an ordering heuristic, its task, and its result.

A task has three parts, and each caches its counts: `Activity` holds the units that calibration tokens use, `Demand` the
reads from flash that a plan's pins and cache leave, and `OrderTask` adds the device. Orders are judged on the last
tokens: `fitting` is the task without them, `judge` models an order's time on them.

An order's cost is the flash seconds of a token, after page rounding and access collapse (Ripple 5.1). They are needed
for thousands of tokens under many gaps for each order that is tried, so `modelled` is a short form of
compiler/seconds.py, for units in a section that begins on a page; tests/compiler/test_order_cost.py checks that the two
agree. The runtime's planner counts the reads. Left out are the bound on the length of one read, which adds a read per
512 KiB, and the limit of the read buffer: it is assumed that each half holds a longest read.

Layers that share an order (a group, ActiveFlow 3) lie side by side in `bits`, so that a sum over tokens is a sum over
layers too; each layer has its own pins, its own cache and its own reads, and its units lie at a stride of the group,
whose seconds add up.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from coldpress.compiler.activity.packed_bits import population
from coldpress.runtime import _native
from coldpress.runtime.cache import CacheFacts, make
from coldpress.runtime.plugins import PluginBase
from coldpress.runtime.store.planner import Strided, count_reads
from coldpress.schemas.base import Options
from coldpress.schemas.device import Flash, flash_seconds

JUDGED_SHARE = 1 / 8
MOST_JUDGED_TOKENS = 2048
TOKENS_AT_A_TIME = 512
"""Tokens whose bits are unpacked together; a multiple of eight."""


class OrderCost(NamedTuple):
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
) -> list[OrderCost]:
    """Returns the cost of reading `bits` in an order, unit ids by flash position, for each of `gaps`, int64 bytes,
    ascending. `bits` are packed activations that cause a flash read, uint8 [num_units, num_layers * ceil(num_tokens /
    8)], those of a group's layers side by side; `unit_bytes` are those of one layer's part of a unit."""
    totals = np.zeros((3, gaps.size))
    for layer, part in enumerate(np.split(bits, num_layers, axis=1)):
        units = Strided(layer * unit_bytes, unit_bytes, num_layers * unit_bytes)
        reads, read_bytes = _counted(part, num_tokens, order, units, flash.page_bytes.value, gaps)
        totals += [found.mean(axis=0) for found in (flash_seconds(flash, reads, read_bytes), reads, read_bytes)]
    return [OrderCost(float(s), float(r), float(b), gap) for s, r, b, gap in zip(*totals, gaps.tolist(), strict=True)]


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


def pair_counts(bits: np.ndarray, num_tokens: int, threads: int = 1) -> np.ndarray:
    """Counts at [i, j] the tokens on which units i < j are both active (Ripple 4.1, Eqs. 1-2); other cells are
    undefined. Exact, and equal for any number of threads.

    Args:
        bits: Packed activations, uint8 [num_units, ceil(num_tokens / 8)], padding bits 0.

    Returns:
        uint16 [num_units, num_units], or uint32 from 65,536 tokens on: 411 MB (uint16) for 14,336 units.
    """
    num_units, num_bytes = bits.shape
    words = np.zeros((num_units, -(-num_bytes // 8) * 8), np.uint8)
    words[:, :num_bytes] = bits
    counts = np.zeros((num_units, num_units), np.uint16 if num_tokens < 1 << 16 else np.uint32)
    _native.count_pairs(words.view(np.uint64), counts, threads)
    return counts


class Arranged(NamedTuple):
    order: np.ndarray
    """int32 [num_units]: unit ids by position on flash, a permutation."""
    heuristic: str
    """The heuristic that made the order: the file's own name, or the winner's where heuristics compete."""


@dataclass(frozen=True)
class Activity:
    """The activity that calibration saw of one family, in one layer or in each layer of a group."""

    bits: np.ndarray
    """uint8 [num_units, num_layers * ceil(num_tokens / 8)], packed (schemas/activations.py), layer by layer."""
    num_tokens: int
    """Tokens of each layer."""
    num_layers: int = 1
    threads: int = 1

    @cached_property
    def counts(self) -> np.ndarray:
        """Co-activation counts [num_units, num_units] over all layers; defined at [i, j] with i < j."""
        return pair_counts(self.bits, self.num_columns, self.threads)

    @cached_property
    def totals(self) -> np.ndarray:
        """Activations of each unit over all layers, int64 [num_units]."""
        return population(self.bits)

    @property
    def num_columns(self) -> int:
        """The number of tokens of all layers: an upper bound on every count and total."""
        return self.num_layers * self.num_tokens

    @property
    def by_layer(self) -> np.ndarray:
        """The bits of each layer, uint8 [num_units, num_layers, ceil(num_tokens / 8)], a view."""
        return self.bits.reshape(len(self.bits), self.num_layers, -1)

    def between(self, start: int, stop: int) -> "Activity":
        """Returns the tokens `start` to `stop` of every layer; both multiples of eight, or `stop` the last token."""
        found = self.by_layer[:, :, start // 8 : -(-stop // 8)]
        return replace(self, bits=np.ascontiguousarray(found).reshape(len(found), -1), num_tokens=stop - start)


@dataclass(frozen=True)
class Demand:
    """The reads of flash: an activity, less the units that DRAM keeps under a plan."""

    activity: Activity
    pinned: np.ndarray
    """bool [num_layers, num_units]: units that `place` keeps in DRAM, so flash is never read for them."""
    cache: str
    cache_slots: tuple[int, ...]
    """Units of the family that each layer's cache holds beside the pinned ones."""
    search_tokens: int
    """The number of last tokens that `missed` looks at; other counts use all tokens."""
    cache_options: Options = field(default_factory=dict)

    @cached_property
    def left_on_flash(self) -> np.ndarray:
        """Ids of the units that some layer does not pin, int32, ascending."""
        return np.flatnonzero(~self.pinned.all(axis=0)).astype(np.int32)

    @property
    def num_judged(self) -> int:
        total = self.activity.num_tokens
        first = max(int(total * (1 - JUDGED_SHARE)), total - MOST_JUDGED_TOKENS)
        return total - first // 8 * 8

    @cached_property
    def fitting(self) -> "Demand":
        """The same demand without the judged tokens (at least one)."""
        return replace(self, activity=self.activity.between(0, self.activity.num_tokens - self.num_judged))

    @cached_property
    def missed(self) -> Activity:
        """The last `search_tokens` tokens, reduced to activations that flash is read for; the cache starts empty."""
        return self._reads_from(self.activity.num_tokens - self.search_tokens)

    @cached_property
    def judged_reads(self) -> Activity:
        """The activations that flash is read for on the judged tokens; as many tokens before them fill the cache."""
        found = self._reads_from(self.activity.num_tokens - 2 * self.num_judged)
        return found.between(found.num_tokens - self.num_judged, found.num_tokens)

    def _reads_from(self, start: int) -> Activity:
        """Returns what flash is read for from token `start` on, rounded down to a whole byte of bits."""
        late = self.activity.between(max(0, start) // 8 * 8, self.activity.num_tokens)
        parts = [
            read_bits(bits, late.num_tokens, pinned, self.cache, slots, self.cache_options)
            for bits, pinned, slots in zip(late.by_layer.swapaxes(0, 1), self.pinned, self.cache_slots, strict=True)
        ]
        return replace(late, bits=parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))


@dataclass(frozen=True)
class OrderTask:
    demand: Demand
    unit_bytes: int
    """Bytes of one layer's part of a unit."""
    flash: Flash

    @property
    def activity(self) -> Activity:
        return self.demand.activity

    @property
    def num_units(self) -> int:
        return len(self.activity.bits)

    @property
    def fitting(self) -> "OrderTask":
        return replace(self, demand=self.demand.fitting)

    def with_pinned_last(self, order: np.ndarray) -> np.ndarray:
        """Appends the units that all layers pin, by id, to an order of the others; int32 [num_units]."""
        return np.concatenate([order, np.flatnonzero(self.demand.pinned.all(axis=0))]).astype(np.int32)

    def judge(self, order: np.ndarray) -> OrderCost:
        """Returns an order's cost on the judged tokens under its best gap; on ties, the gap with the fewest reads."""
        return min(self.judge_gaps(order))

    def judge_gaps(self, order: np.ndarray) -> list[OrderCost]:
        """Returns an order's cost on the judged tokens for each collapse gap, ascending."""
        reads = self.demand.judged_reads
        gaps = gap_candidates(self.flash)
        return modelled(reads.bits, reads.num_tokens, order, self.unit_bytes, self.flash, gaps, reads.num_layers)

    @property
    def least_seconds(self) -> float:
        """A lower bound on any order's seconds on the judged tokens."""
        reads = self.demand.judged_reads
        return least_seconds(reads.bits, reads.num_tokens, self.unit_bytes, self.flash, reads.num_layers)


class Heuristic(PluginBase):
    """The base class of all heuristics."""

    COUNT_SQUARES: ClassVar[int] = 1
    """The most squares of pair counts [num_units, num_units] held at a time, for `preflight`."""

    @abstractmethod
    def arrange(self, task: OrderTask) -> Arranged:
        """Returns the order on flash and the name of the heuristic that made it; depends on the task alone."""


def read_bits(
    bits: np.ndarray,
    num_tokens: int,
    pinned: np.ndarray,
    cache: str,
    cache_slots: int,
    options: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Returns the activations that are read from flash, packed like `bits`: uint8 [num_units, ceil(num_tokens / 8)].
    `pinned`, bool [num_units], are always in DRAM; beside them the cache, a file of runtime/cache, holds `cache_slots`
    units, none at first. A policy that uses flash positions gets unit ids instead, since the order is not known yet."""
    found = bits.copy()
    found[pinned] = 0
    known = CacheFacts(len(bits), cache_slots, np.flatnonzero(pinned), np.arange(len(bits)))
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
