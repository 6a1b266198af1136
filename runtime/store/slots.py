"""Records which unit is in which slot: the pinned and cached units of each part (PowerInfer 5.2). Bookkeeping only.

A part is one family of one layer. Each part has its own cache, even if its units share a section with other layers.
Slots of a family are numbered through all layers: each layer's pinned units in flash order, then its cached ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.cache import CachePolicy, Known, make
from coldpress.runtime.store.facts import Key
from coldpress.runtime.store.planner import Strided
from coldpress.schemas.families import FamilyName
from coldpress.schemas.layout import Plan, Section, placed_parts

Requests = Mapping[tuple[int, str], Sequence[np.ndarray]]
"""The ids of each request in order, by layer and family."""


class FreeSlots:
    """The empty slots of a part, int32; the slot given back last is filled first.

    An array, because a list of integers would take ten times the bytes, and a model has one slot per unit in memory.
    """

    def __init__(self, first: int, first_free: int, stop: int) -> None:
        """Begins with slots `first` to `stop` (exclusive), of which `first_free` and later ones are free."""
        self._slots = np.empty(stop - first, np.int32)
        self._count = stop - first_free
        self._slots[: self._count] = np.arange(stop - 1, first_free - 1, -1, dtype=np.int32)

    def put(self, slots: np.ndarray) -> None:
        """Gives slots back, int32."""
        self._slots[self._count : self._count + slots.size] = slots
        self._count += slots.size

    def take(self, count: int) -> np.ndarray:
        """Takes the next `count` slots to fill, int32."""
        stop, self._count = self._count, self._count - count
        return self._slots[self._count : stop][::-1]


@dataclass
class Part:
    """One family of one layer in use."""

    units: Strided
    """Where its units lie on flash."""
    cache: CachePolicy
    order: np.ndarray
    """int32 [num_units], the unit at each flash position; all layers of a group share this array."""
    position: np.ndarray
    """int32 [num_units], the flash position of each unit."""
    slot: np.ndarray
    """int32 [num_units], the slot of each pinned or cached unit; meaningless for other units."""
    free: FreeSlots

    def in_flash_order(self, ids: np.ndarray) -> np.ndarray:
        """Sorts `ids` by ascending flash position."""
        return ids[np.argsort(self.position[ids])]

    def admit(self, misses: np.ndarray) -> np.ndarray:
        """Lets the policy choose among missing units and gives the slots of evicted units to the admitted ones.

        Returns:
            The units that were evicted, integers.
        """
        admitted, evicted = self.cache.admit(misses)
        self.free.put(self.slot[evicted])  # before `take`: a full part has no other free slots
        if admitted.size:
            self.slot[admitted] = self.free.take(admitted.size)
        return evicted

    def end_tokens(self, count: int) -> int:
        """Tells the policy that `count` tokens have ended; returns the number of units that it evicts."""
        evicted = self.cache.end_tokens(count)
        if evicted.size:
            self.free.put(self.slot[evicted])
        return evicted.size

    def resize(self, capacity: int, pinned: np.ndarray, first_slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Renumbers the part's slots from `first_slot` on: one for each pinned unit, and `capacity` for cached ones.

        Returns:
            The old and the new slots of the units that stay in memory, both int32 [m]; and the ids of pinned units
            that must be read.
        """
        before = self.cache.present
        self.cache.resize(capacity, pinned)
        after = self.cache.present
        remaining, unread = np.flatnonzero(before & after), np.flatnonzero(after & ~before)
        present = self.in_flash_order(np.concatenate([remaining, unread]))
        old = self.slot[remaining].copy()
        self.slot[present] = np.arange(first_slot, first_slot + present.size, dtype=self.slot.dtype)
        stop = first_slot + pinned.size + capacity
        self.free = FreeSlots(first_slot, first_slot + present.size, stop)
        return old, self.slot[remaining], unread

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
    """Makes all parts of a plan, with empty caches and numbered slots.

    Args:
        artifact: The open artifact.
        plan: Names the policy.
        requests: All requests of the trace that is simulated; None in a run.

    Raises:
        ColdpressError: if the policy cannot be used, for example if it needs `requests` and they are None.
    """
    next_slot = dict.fromkeys((part.family for part in plan.parts), 0)
    positions = {section.offset_bytes: _positions(artifact, section) for section in artifact.manifest.flash.sections}
    parts: dict[Key, Part] = {}
    for wanted, section in placed_parts(plan, artifact.manifest.flash.sections):
        family: FamilyName = wanted.family
        pinned = artifact.rank(wanted.layer, family)[: wanted.num_pinned]
        order, position = positions[section.offset_bytes]
        slot, first = np.full_like(order, -1), next_slot[family]
        middle, next_slot[family] = first + wanted.num_pinned, first + wanted.num_pinned + wanted.cache_slots
        slot[pinned[np.argsort(position[pinned])]] = np.arange(first, middle, dtype=slot.dtype)
        free = FreeSlots(first, middle, next_slot[family])
        future = None if requests is None else requests.get((wanted.layer, family), ())
        known = Known(section.num_units, wanted.cache_slots, pinned, position, future)
        cache = make(plan.cache, plan.cache_options, known)
        units = Strided(section.part_offset_bytes(wanted.layer), section.unit_bytes, section.stride_bytes)
        parts[wanted.layer, family] = Part(units, cache, order, position, slot, free)
    return parts


def resized(
    artifact: Artifact, plan: Plan, parts: Mapping[Key, Part]
) -> tuple[dict[FamilyName, tuple[np.ndarray, np.ndarray]], dict[Key, np.ndarray]]:
    """Resizes the parts of a run to another plan.

    Returns:
        By family, the old and the new slots of units that stay in memory; and by layer and family, the ids of pinned
        units that must be read.
    """
    next_slot: dict[FamilyName, int] = {}
    moves: dict[FamilyName, list[tuple[np.ndarray, np.ndarray]]] = {}
    unread: dict[Key, np.ndarray] = {}
    for wanted in plan.parts:
        family, first = wanted.family, next_slot.get(wanted.family, 0)
        pinned = artifact.rank(wanted.layer, family)[: wanted.num_pinned]
        old, new, unread[wanted.layer, family] = parts[wanted.layer, family].resize(wanted.cache_slots, pinned, first)
        moves.setdefault(family, []).append((old, new))
        next_slot[family] = first + wanted.num_pinned + wanted.cache_slots
    joined = {family: tuple(map(np.concatenate, zip(*each, strict=True))) for family, each in moves.items()}
    return {family: (old, new) for family, (old, new) in joined.items()}, unread


def _positions(artifact: Artifact, section: Section) -> tuple[np.ndarray, np.ndarray]:
    """Returns a section's unit at each flash position, and the flash position of each unit, both int32 [num_units]."""
    order = artifact.order(section)
    position = np.empty_like(order)
    position[order] = np.arange(order.size, dtype=order.dtype)
    return order, position


def num_slots(plan: Plan, family: FamilyName) -> int:
    """Returns the number of a family's slots over all layers, pinned and cached."""
    return sum(part.num_pinned + part.cache_slots for part in plan.parts if part.family == family)
