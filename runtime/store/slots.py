"""Records which unit is in which slot: the pinned and cached units of each part (PowerInfer 5.2). Bookkeeping only.

A part is one family of one layer. Each part has its own cache, even if its units share a section with other layers.
Slots of one pool, a family's units of one size, are numbered through its layers: each layer's pinned units in flash
order, then its cached ones.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.cache import CacheFacts, CachePolicy, make
from coldpress.runtime.store.facts import Key
from coldpress.runtime.store.planner import Strided
from coldpress.schemas.families import FamilyName
from coldpress.schemas.layout import Plan, Section, placed_parts

Requests = Mapping[tuple[int, str], Sequence[np.ndarray]]
"""The ids of each request in order, by layer and family."""
Pool = tuple[FamilyName, int]
"""Units that lie in one array in memory: a family, and the bytes of a unit, which differ where layers' formats do."""


class FreeSlots:
    """The empty slots of a part; the slot given back last is filled first. Slots that were never filled are a range,
    and only those given back are listed: a full cache lists none for longer than a request takes."""

    def __init__(self, first: int, dtype: np.dtype[Any]) -> None:
        """Begins with all slots from `first` on; slots are numbers of `dtype`."""
        self._first = first
        self._back = np.empty(0, dtype)

    def put(self, slots: np.ndarray) -> None:
        self._back = np.concatenate([self._back, slots])

    def take(self, count: int) -> np.ndarray:
        """Takes the next `count` slots to fill; there must be as many."""
        listed = max(0, self._back.size - count)
        back, self._back = self._back[listed:][::-1], self._back[:listed].copy()
        first, self._first = self._first, self._first + count - back.size
        return np.concatenate([back, np.arange(first, self._first, dtype=back.dtype)])


@dataclass
class Part:
    units: Strided
    cache: CachePolicy
    order: np.ndarray
    """[num_units], the unit at each flash position; all layers of a group share this array and the next. These arrays
    have the smallest unsigned type that holds their numbers (runtime/unit_numbers.py)."""
    position: np.ndarray
    """[num_units], the flash position of each unit."""
    slot: np.ndarray
    """[num_units], the slot of each pinned or cached unit, counted from `first_slot`; meaningless for other units."""
    first_slot: int
    free: FreeSlots
    pool: Pool

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """Returns the slots of pinned or cached units in the memory of the pool, int32 [k]."""
        return self.slot[ids].astype(np.int32) + np.int32(self.first_slot)

    def units_at(self, positions: np.ndarray | slice) -> np.ndarray:
        """Returns the units at flash positions, int32 [k]."""
        return self.order[positions].astype(np.int32)

    def in_flash_order(self, ids: np.ndarray) -> np.ndarray:
        return ids[np.argsort(self.position[ids])]

    def admit(self, misses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lets the policy choose among missing units and gives the slots of evicted units to the admitted ones. Returns
        the units that were admitted and those that were evicted, integers."""
        admitted, evicted = self.cache.admit(misses)
        self.free.put(self.slot[evicted])  # before `take`: a full part has no other free slots
        if admitted.size:
            self.slot[admitted] = self.free.take(admitted.size)
        return admitted, evicted

    def end_tokens(self, count: int) -> int:
        """Tells the policy that `count` tokens have ended; returns the number of units that it evicts."""
        evicted = self.cache.end_tokens(count)
        if evicted.size:
            self.free.put(self.slot[evicted])
        return evicted.size

    def resize(self, capacity: int, pinned: np.ndarray, first_slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Renumbers the part's slots from `first_slot` on: one for each pinned unit, and `capacity` for cached ones.

        Returns the old and the new slots of the units that stay in memory, both int32 [m]; and the ids of pinned units
        that must be read.
        """
        before = self.cache.present
        self.cache.resize(capacity, pinned)
        after = self.cache.present
        remaining, unread = np.flatnonzero(before & after), np.flatnonzero(after & ~before)
        present = self.in_flash_order(np.concatenate([remaining, unread]))
        old = self.slots(remaining)
        self.slot[present] = np.arange(present.size, dtype=self.slot.dtype)
        self.first_slot, self.free = first_slot, FreeSlots(present.size, self.slot.dtype)
        return old, self.slots(remaining), unread

    def unpin(self, ids: np.ndarray) -> None:
        """Unpins units that are not in memory and frees their slots."""
        self.cache.unpin(ids)
        self.free.put(self.slot[ids])

    def forget(self, unread: np.ndarray) -> None:
        """Undoes the admission of units that were not read, so that they do not pass for cached."""
        lost = unread[self.cache.contains(unread)]
        if lost.size:
            self.cache.drop(lost)
            self.free.put(self.slot[lost])


def parts_of(artifact: Artifact, plan: Plan, requests: Requests | None = None) -> dict[Key, Part]:
    """Makes all parts of a plan, with empty caches and numbered slots. Raises `ColdpressError` if the policy cannot be
    used, for example if it needs `requests`, which only a simulation has."""
    next_slot: Counter[Pool] = Counter()
    positions = {section.offset_bytes: _positions(artifact, section) for section in artifact.manifest.flash.sections}
    parts: dict[Key, Part] = {}
    for wanted, section in placed_parts(plan, artifact.manifest.flash.sections):
        family: FamilyName = wanted.family
        pinned = artifact.rank(wanted.layer, family)[: wanted.num_pinned]
        order, position = positions[section.offset_bytes]
        pool = pool_of(section)
        slot, first_slot = np.zeros_like(order), next_slot[pool]
        next_slot[pool] += wanted.num_pinned + wanted.cache_slots
        slot[pinned[np.argsort(position[pinned])]] = np.arange(wanted.num_pinned, dtype=slot.dtype)
        free = FreeSlots(wanted.num_pinned, slot.dtype)
        future = None if requests is None else requests.get((wanted.layer, family), ())
        known = CacheFacts(section.num_units, wanted.cache_slots, pinned, position, future)
        cache = make(plan.cache, plan.cache_options, known)
        units = Strided(section.part_offset_bytes(wanted.layer), section.unit_bytes, section.stride_bytes)
        parts[wanted.layer, family] = Part(units, cache, order, position, slot, first_slot, free, pool)
    return parts


def resized(
    artifact: Artifact, plan: Plan, parts: Mapping[Key, Part]
) -> tuple[dict[Pool, tuple[np.ndarray, np.ndarray]], dict[Key, np.ndarray]]:
    """Resizes the parts of a run to another plan. Returns by pool, the old and the new slots of units that stay in
    memory; and by layer and family, the ids of pinned units that must be read."""
    next_slot: Counter[Pool] = Counter()
    moves: dict[Pool, list[tuple[np.ndarray, np.ndarray]]] = {}
    unread: dict[Key, np.ndarray] = {}
    for wanted in plan.parts:
        key, part = (wanted.layer, wanted.family), parts[wanted.layer, wanted.family]
        pinned = artifact.rank(*key)[: wanted.num_pinned]
        old, new, unread[key] = part.resize(wanted.cache_slots, pinned, next_slot[part.pool])
        moves.setdefault(part.pool, []).append((old, new))
        next_slot[part.pool] += wanted.num_pinned + wanted.cache_slots
    joined = {pool: tuple(map(np.concatenate, zip(*each, strict=True))) for pool, each in moves.items()}
    return {pool: (old, new) for pool, (old, new) in joined.items()}, unread


def _positions(artifact: Artifact, section: Section) -> tuple[np.ndarray, np.ndarray]:
    order = artifact.order(section)
    position = np.empty_like(order)
    position[order] = np.arange(order.size, dtype=order.dtype)
    return order, position


def pool_of(section: Section) -> Pool:
    return section.family, section.unit_bytes


def num_slots(plan: Plan, sections: Iterable[Section]) -> dict[Pool, int]:
    """Returns the number of each pool's slots over all layers, pinned and cached."""
    found: Counter[Pool] = Counter()
    for part, section in placed_parts(plan, sections):
        found[pool_of(section)] += part.num_pinned + part.cache_slots
    return found
