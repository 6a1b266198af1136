"""What an ordering heuristic is, what it is given and what it gives.

A heuristic is a file of this package whose class `Plugin` extends `Heuristic`. Its task has three parts, each of which
caches what it has counted: `Activity` is what calibration saw, `Demand` is what flash is read for under a plan's pins
and cache, and `Task` adds the device; tasks for several devices share one demand. Orders are judged on the last tokens:
`fitting` is the task without them, `judge` gives an order's modelled time on them.

Layers that share an order (a group, ActiveFlow 3) lie side by side in `bits`, so that what is summed over tokens is
summed over layers too; each layer has its own pins, its own cache and its own reads, at a stride of the whole group.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from coldpress.compiler.activity.packed_bits import population
from coldpress.compiler.stages.order._coactivation import gpu_pair_counts, pair_counts
from coldpress.compiler.stages.order._misses import read_bits
from coldpress.compiler.stages.order._seconds import Modelled, gap_candidates, least_seconds, modelled
from coldpress.runtime.plugins import PluginBase
from coldpress.schemas.base import Options
from coldpress.schemas.device import Flash

JUDGED_SHARE = 1 / 8
MOST_JUDGED_TOKENS = 2048


class Arranged(NamedTuple):
    """What a heuristic gives."""

    order: np.ndarray
    """int32 [num_units]: unit ids by position on flash, a permutation."""
    heuristic: str
    """Whose order it is: the name of the file itself, or of the winner where heuristics compete."""


@dataclass(frozen=True)
class Activity:
    """What calibration saw of one family, in one layer or in each layer of a group."""

    bits: np.ndarray
    """uint8 [num_units, num_layers * ceil(num_tokens / 8)], packed (schemas/activations.py), layer by layer."""
    num_tokens: int
    """Tokens of each layer."""
    num_layers: int = 1
    threads: int = 1
    gpu: bool = False
    """Whether co-activation is counted on a GPU; the counts are the same."""

    @cached_property
    def counts(self) -> np.ndarray:
        """Co-activation counts [num_units, num_units], of which [i, j] with i < j means something; of all layers."""
        if self.gpu:
            return gpu_pair_counts(self.bits, self.num_columns)
        return pair_counts(self.bits, self.num_columns, self.threads)

    @cached_property
    def totals(self) -> np.ndarray:
        """Activations of each unit, int64 [num_units], of all layers."""
        return population(self.bits)

    @property
    def num_columns(self) -> int:
        """Tokens of all layers: the most that a count or a total can be."""
        return self.num_layers * self.num_tokens

    @property
    def by_layer(self) -> np.ndarray:
        """The bits of each layer, uint8 [num_units, num_layers, ceil(num_tokens / 8)], a view."""
        return self.bits.reshape(len(self.bits), self.num_layers, -1)

    def between(self, start: int, stop: int) -> "Activity":
        """The tokens from `start`, a multiple of eight, to `stop`, one too or the last token, of every layer."""
        found = self.by_layer[:, :, start // 8 : -(-stop // 8)]
        return replace(self, bits=np.ascontiguousarray(found).reshape(len(found), -1), num_tokens=stop - start)

    def each_layer(self, change: Callable[[int, np.ndarray], np.ndarray]) -> "Activity":
        """Other bits of the same tokens: `change(index of the layer in the group, its bits)`, of equal shape."""
        parts = [change(number, self.by_layer[:, number]) for number in range(self.num_layers)]
        return replace(self, bits=parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))


@dataclass(frozen=True)
class Demand:
    """What flash is read for: an activity, less what DRAM keeps under a plan."""

    activity: Activity
    pinned: np.ndarray
    """bool [num_layers, num_units]: units that `place` keeps in DRAM, hence never reads."""
    cache: str
    """The plan's cache policy: a file of runtime/cache."""
    cache_slots: tuple[int, ...]
    """Units of the family that each layer's cache holds beside the pinned ones."""
    search_tokens: int
    """Tokens at the end that `missed` looks at; other counts are of all."""
    cache_options: Options = field(default_factory=dict)
    """The cache policy's own."""

    @cached_property
    def left_on_flash(self) -> np.ndarray:
        """Ids of the units that some layer does not pin, int32, ascending."""
        return np.flatnonzero(~self.pinned.all(axis=0)).astype(np.int32)

    @property
    def num_judged(self) -> int:
        """Tokens at the end that orders are judged on."""
        total = self.activity.num_tokens
        first = max(int(total * (1 - JUDGED_SHARE)), total - MOST_JUDGED_TOKENS)
        return total - first // 8 * 8

    @cached_property
    def fitting(self) -> "Demand":
        """The same without the tokens at the end; at least one is left out."""
        return replace(self, activity=self.activity.between(0, self.activity.num_tokens - self.num_judged))

    @cached_property
    def missed(self) -> Activity:
        """The last `search_tokens` tokens, with the activations only that flash is read for; the cache starts empty."""
        return self._reads_from(self.activity.num_tokens - self.search_tokens)

    @cached_property
    def judged_reads(self) -> Activity:
        """What flash is read for on the tokens at the end; as many before them fill the cache."""
        found = self._reads_from(self.activity.num_tokens - 2 * self.num_judged)
        return found.between(found.num_tokens - self.num_judged, found.num_tokens)

    def _reads_from(self, start: int) -> Activity:
        """What flash is read for from token `start` on, or a few before, so that whole bytes are left."""
        late = self.activity.between(max(0, start) // 8 * 8, self.activity.num_tokens)
        return late.each_layer(
            lambda layer, bits: read_bits(
                bits, late.num_tokens, self.pinned[layer], self.cache, self.cache_slots[layer], self.cache_options
            )
        )


@dataclass(frozen=True)
class Task:
    """One family to be put in order, of one layer or of a group: what flash is read for, and how it reads."""

    demand: Demand
    unit_bytes: int
    """Of one layer's part of a unit."""
    flash: Flash
    seed: int = 0

    @property
    def activity(self) -> Activity:
        """What calibration saw."""
        return self.demand.activity

    @property
    def num_units(self) -> int:
        """Units to be ordered, pinned ones included."""
        return len(self.activity.bits)

    @property
    def stride_bytes(self) -> int:
        """From one unit on flash to the next: the parts of all layers (design, section 1)."""
        return self.activity.num_layers * self.unit_bytes

    @property
    def fitting(self) -> "Task":
        """The same task without the tokens at the end."""
        return replace(self, demand=self.demand.fitting)

    def with_pinned_last(self, order: np.ndarray) -> np.ndarray:
        """An order of the units left on flash, completed by those that all layers pin, by id; int32 [num_units]."""
        return np.concatenate([order, np.flatnonzero(self.demand.pinned.all(axis=0))]).astype(np.int32)

    def judge(self, order: np.ndarray) -> Modelled:
        """What an order costs on the tokens at the end under its best gap; of equal ones, with the fewest reads."""
        return min(self.judge_gaps(order))

    def judge_gaps(self, order: np.ndarray) -> list[Modelled]:
        """What an order costs on the tokens at the end, by ascending collapse gap."""
        reads = self.demand.judged_reads
        gaps = gap_candidates(self.flash)
        return modelled(reads.bits, reads.num_tokens, order, self.unit_bytes, self.flash, gaps, reads.num_layers)

    @property
    def least_seconds(self) -> float:
        """What no order beats on the tokens at the end."""
        reads = self.demand.judged_reads
        return least_seconds(reads.bits, reads.num_tokens, self.unit_bytes, self.flash, reads.num_layers)


class Heuristic(PluginBase):
    """Puts the units of one family in order. The base class of all heuristics."""

    COUNT_SQUARES: ClassVar[int]
    """Squares of pair counts [num_units, num_units] that it holds at a time at most, for `preflight`."""

    @abstractmethod
    def arrange(self, task: Task) -> Arranged:
        """The order on flash, and the name of the heuristic whose it is; a function of the task alone."""
