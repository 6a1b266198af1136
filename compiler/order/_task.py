"""What an order plug-in is given: activations, what DRAM keeps of them, and the flash that the rest is read from.

The last tokens are for judging orders: `fitting` is the problem without them, `judge` an order's modelled time on them.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from compiler.activity.packed_bits import population
from compiler.order._coactivation import gpu_pair_counts, pair_counts
from compiler.order._misses import read_bits
from compiler.order._seconds import Modelled, gap_candidates, least_seconds, modelled
from schemas.device import Flash

JUDGED_SHARE = 1 / 8
MOST_JUDGED_TOKENS = 2048


@dataclass(frozen=True)
class Problem:
    """One family of one layer."""

    bits: np.ndarray
    """uint8 [num_units, ceil(num_tokens / 8)], packed activations (schemas/activations.py)."""
    num_tokens: int
    pinned: np.ndarray
    """bool [num_units]: units that `place` keeps in DRAM, hence never reads."""
    cache: str
    """The plan's cache policy: a file of runtime/cache."""
    cache_slots: int
    """Units of the family that it holds beside the pinned ones."""
    unit_bytes: int
    flash: Flash
    search_tokens: int
    """Tokens at the end that `missed` looks at; other counts are of all."""
    seed: int = 0
    threads: int = 1
    gpu: bool = False
    """Whether co-activation is counted on a GPU; the counts are the same."""

    @cached_property
    def counts(self) -> np.ndarray:
        """Co-activation counts [num_units, num_units], of which [i, j] with i < j means something."""
        if self.gpu:
            return gpu_pair_counts(self.bits, self.num_tokens)
        return pair_counts(self.bits, self.num_tokens, self.threads)

    @cached_property
    def totals(self) -> np.ndarray:
        """Activations of each unit, int64 [num_units]."""
        return population(self.bits)

    @cached_property
    def left_on_flash(self) -> np.ndarray:
        """Ids of the units that are not pinned, int32, ascending."""
        return np.flatnonzero(~self.pinned).astype(np.int32)

    def with_pinned_last(self, order: np.ndarray) -> np.ndarray:
        """An order of the units left on flash, completed by the pinned ones, by id; int32 [num_units]."""
        return np.concatenate([order, np.flatnonzero(self.pinned)]).astype(np.int32)

    @property
    def num_judged(self) -> int:
        """Tokens at the end that orders are judged on."""
        first = max(int(self.num_tokens * (1 - JUDGED_SHARE)), self.num_tokens - MOST_JUDGED_TOKENS)
        return self.num_tokens - first // 8 * 8

    @cached_property
    def fitting(self) -> "Problem":
        """The same problem without the tokens at the end; at least one is left out."""
        num_tokens = self.num_tokens - self.num_judged
        return replace(self, bits=np.ascontiguousarray(self.bits[:, : num_tokens // 8]), num_tokens=num_tokens)

    @cached_property
    def missed(self) -> "Problem":
        """The last `search_tokens` tokens, with the activations only that flash is read for; the cache starts empty."""
        first = max(0, self.num_tokens - self.search_tokens) // 8
        num_tokens = self.num_tokens - 8 * first
        bits = read_bits(self.bits[:, first:], num_tokens, self.pinned, self.cache, self.cache_slots)
        return replace(self, bits=bits, num_tokens=num_tokens, cache_slots=0)

    @cached_property
    def judged_reads(self) -> np.ndarray:
        """What flash is read for on the tokens at the end, packed like `bits`; as many before them fill the cache."""
        warm = max(0, self.num_tokens - 2 * self.num_judged) // 8
        tokens = self.num_tokens - 8 * warm
        found = read_bits(self.bits[:, warm:], tokens, self.pinned, self.cache, self.cache_slots)
        return np.ascontiguousarray(found[:, (tokens - self.num_judged) // 8 :])

    def judge(self, order: np.ndarray) -> Modelled:
        """What an order costs on the tokens at the end under its best gap; of equal ones, with the fewest reads."""
        return min(self.judge_gaps(order))

    def judge_gaps(self, order: np.ndarray) -> list[Modelled]:
        """What an order costs on the tokens at the end, by ascending collapse gap."""
        gaps = gap_candidates(self.flash)
        return modelled(self.judged_reads, self.num_judged, order, self.unit_bytes, self.flash, gaps)

    @property
    def least_seconds(self) -> float:
        """What no order beats on the tokens at the end."""
        return least_seconds(self.judged_reads, self.num_judged, self.unit_bytes, self.flash)
