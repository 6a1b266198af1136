"""Reading ahead: units are read before they are asked for (ActiveFlow 3, Figs. 8-11).

Inputs change little from layer to layer, so the next section's selector, given this layer's input, chooses most of the
units that it will choose. The guess is made when the current layer has all its units, so that what is asked for now
comes first. Where sections hold one layer, a layer reads ahead for the next one; where they hold N, each layer of a
group reads its share of flash for the whole next group, with the freshest input that there is. A guess is one more
choice per section, of a selector that reads the input itself; no matrix is multiplied for a guess alone. A plan may
read only the largest entries of the input, which are the most certain to be large in the next layer, too.

The reads land in a buffer of their own, inside the DRAM budget: a region for each family, or two in turn where layers
lie in groups, since a group is still in use while the next one is read. One read brings a unit's parts of all layers of
a group. A request takes its units from there and reads the rest; units that nobody asks for are lost when the next
section takes the region, or the token ends. A read that fails counts as not made: whoever asks for its units reads
them again, so damage shows where, and only where, it matters.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.artifact.errors import DeviceError
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.flash import Ticket
from coldpress.runtime.sparsity import Residency
from coldpress.runtime.store import planner
from coldpress.runtime.store.ahead_room import divided, guessed_families, rooms
from coldpress.runtime.store.facts import AheadFacts, Key, Observers, Purpose
from coldpress.runtime.store.reads import Half, longest_read_bytes
from coldpress.runtime.store.slots import Part
from coldpress.schemas.errors import CorruptPageError
from coldpress.schemas.families import FAMILIES, FamilyName
from coldpress.schemas.layout import Plan, Section

MAX_REGION_BYTES = 1 << 30
"""More is not used: places in a region are numbers of 32 bits."""


class Choose(Protocol):
    """What a layer would ask for if its input were that of an earlier layer."""

    def __call__(self, key: Key, signal_TN: np.ndarray, residency: Residency) -> tuple[list[np.ndarray], np.ndarray]:
        """For an input float32 [T, hidden_size]: the ids that each token would use, int32 ascending, and the signal
        that the selector sees, float32 [T, n]."""
        ...


@dataclass
class _Portion:
    """Reads ahead that were begun together."""

    batch: planner.ReadBatch
    places: np.ndarray
    """int64 [m] ascending: position * layers of the section + layer of the section, of each unit in the batch."""
    start: int
    """Where in its region they land."""
    ticket: Ticket
    failed: bool = False

    def wait(self, count: int) -> bool:
        """Waits for the first `count` reads; whether they succeeded."""
        try:
            if not self.failed:
                self.ticket.wait(count)
        except (CorruptPageError, DeviceError):
            self.failed = True
        return not self.failed


@dataclass
class _Region:
    """Memory for one section at a time."""

    half: Half
    section: Section | None = None
    used_bytes: int = 0
    portions: list[_Portion] = field(default_factory=list[_Portion])


@dataclass
class EarlyUnits:
    """Units of a request that were read ahead together."""

    ids: np.ndarray
    """int32 [k], in flash order."""
    rows: np.ndarray
    """uint8 [m, unit_bytes]; rows may overlap."""
    _offsets: np.ndarray
    """int64 [k], bytes from the portion's start."""
    _portion: _Portion
    num_read: int = 0
    """How many of them are in memory and were given out."""

    @property
    def unread(self) -> np.ndarray:
        """int32, the units that were not given out."""
        return self.ids[self.num_read :]

    def give_up(self) -> np.ndarray:
        """Returns the units whose reads failed; the caller reads them itself."""
        lost, self.num_read = self.unread, self.ids.size
        return lost

    def arrivals(self, least_bytes: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, their rows' numbers, int32 both) as they arrive, at least `least_bytes` read between two; stops early
        where a read fails."""
        batch = planner.ReadBatch(self._portion.batch.extents, 0, self._offsets)
        for first, stop, count in planner.arrivals(batch, self.rows.shape[1], least_bytes):
            if not self._portion.wait(count):
                return
            self.num_read = stop
            yield self.ids[first:stop], (self._portion.start + self._offsets[first:stop]).astype(np.int32)


def _region(size: int, unit_bytes: int) -> _Region:
    memory = _native.aligned_buffer(size)
    return _Region(Half(memory, np.lib.stride_tricks.sliding_window_view(memory, unit_bytes)))


class ReadAhead:
    """What was read ahead and not yet asked for, and what to read ahead next."""

    def __init__(
        self,
        plan: Plan,
        sections: Sequence[Section],
        page_bytes: int,
        parts: Mapping[Key, Part],
        begin: Callable[[Purpose, planner.ReadBatch, np.ndarray], Ticket],
        observers: Observers,
    ) -> None:
        """Allocates the buffer.

        Args:
            plan: Its `preload_buffer_bytes` are divided among families as they need them; 0 for no reading ahead.
            sections: All of the artifact.
            page_bytes: Size of a page.
            parts: All of the store.
            begin: Begins the reads of a batch into memory.
            observers: The store's.
        """
        self.enabled = plan.preload_buffer_bytes > 0
        self._page_bytes, self._gap_bytes, self._guess = page_bytes, plan.collapse_gap_bytes, plan.preload_guess
        self._parts, self._begin_reads, self._observers = parts, begin, observers
        self._sections = {(layer, section.family): section for section in sections for layer in section.layers}
        self._following = _following(sections) if self.enabled else {}
        self._regions: list[_Region] = []
        self._region_of: dict[Key, _Region] = {}
        found = rooms(sections, plan.parts, page_bytes) if self.enabled else {}
        for family, granted in divided(found, plan.preload_buffer_bytes, page_bytes).items():
            granted, copies = min(granted, MAX_REGION_BYTES), found[family].copies
            of_family = [section for section in sections if section.family == family]
            if granted < span_bytes(of_family[0].unit_bytes, page_bytes):
                continue
            regions = [_region(granted, of_family[0].unit_bytes) for _ in range(copies)]
            self._regions += regions
            for index, section in enumerate(of_family):
                self._region_of |= {(layer, family): regions[index % copies] for layer in section.layers}

    def layer_done(self, layer: int, inputs: Mapping[FamilyName, np.ndarray], choose: Choose) -> None:
        """Begins to read what the next sections will ask for, once a layer has all its own units.

        Args:
            layer: The layer that is done.
            inputs: By family, in the order of the layer's requests: the input of attention or of the MLP, float32
                [T, hidden_size], that the family's units were chosen with.
            choose: What another layer would choose for it.
        """
        for family, signal in inputs.items():
            if (layer, family) not in self._following:
                continue
            section, following = self._following[layer, family]
            chosen, all_seen = list[np.ndarray](), list[np.ndarray]()
            for target in following.layers:
                part = self._parts[target, family]
                ids, seen = choose((target, family), signal, Residency(part.cache.present, part.position))
                chosen += ids
                all_seen.append(seen)
            ids = np.unique(np.concatenate(chosen))
            if FAMILIES[family].axis == "hidden_size":
                ids = most_certain(ids, np.concatenate(all_seen), self._guess)
            position = self._parts[following.first_layer, family].position[ids]
            share = position * len(section.layers) // following.num_units == layer - section.first_layer
            self.begin((following.first_layer, family), ids[share])

    def begin(self, key: Key, ids: np.ndarray) -> None:
        """Begins to read units that a request of this token will probably ask for, and returns.

        The cache does not change, and does not count this as a use. Nothing is read where the plan has no room for it.

        Args:
            key: A family and the first layer of a section; the units' parts of all its layers are read, where they are
                missing.
            ids: Unit ids, int32 [k], distinct and ascending.
        """
        batch = self._begin(key, ids)
        facts = AheadFacts(key, ids, self._sections[key].unit_bytes, batch)
        for read_ahead in self._observers.read_ahead:
            read_ahead(facts)

    def _begin(self, key: Key, ids: np.ndarray) -> planner.ReadBatch | None:
        """The reads that were begun, as far as there is room, their units being those that they were begun for."""
        region, section = self._region_of.get(key), self._sections[key]
        if region is None:
            return None
        if region.section is not section:
            self._waited(self._drop(region))
        region.section = section
        places = self._places(section, ids, region)
        room = region.half.memory.size - region.used_bytes
        units = planner.Strided(section.offset_bytes, section.unit_bytes, section.unit_bytes)
        if room < span_bytes(section.unit_bytes, self._page_bytes) or not places.size:
            return None
        longest = longest_read_bytes(room, section.unit_bytes, self._page_bytes)
        places = places[: room // section.unit_bytes + 1]  # no room for more
        planned = planner.plan_reads(units, places, self._page_bytes, self._gap_bytes, longest)
        batch = next(planner.batches(planned, room))
        start, region.used_bytes = region.used_bytes, region.used_bytes + batch.extents.num_bytes
        try:
            ticket = self._begin_reads(Purpose.AHEAD, batch, region.half.memory[start : region.used_bytes])
        except (CorruptPageError, DeviceError):  # of a device that reads at once
            return None
        region.portions.append(_Portion(batch, places[: batch.buffer_offset.size], start, ticket))
        return batch

    def _places(self, section: Section, ids: np.ndarray, region: _Region) -> np.ndarray:
        """The parts of units that are in no memory, int64 ascending, see `_Portion.places`."""
        layers = section.layers
        parts = [self._parts[layer, section.family] for layer in layers]
        missing = [part.position[ids[~part.cache.contains(ids)]].astype(np.int64) for part in parts]
        places = [positions * len(layers) + index for index, positions in enumerate(missing)]
        found = np.sort(np.concatenate(places))
        for portion in region.portions:
            found = np.setdiff1d(found, portion.places, assume_unique=True)
        return found

    def take(self, key: Key, misses: np.ndarray) -> list[EarlyUnits]:
        """The units of `misses`, int32 ids, that were read ahead; they stay until another section takes their place."""
        region, section = self._region_of.get(key), self._sections[key]
        if region is None or region.section is not section:
            return []
        part = self._parts[key]
        index, wanted = key[0] - section.first_layer, np.zeros(part.order.size, bool)
        wanted[part.position[misses]] = True
        found: list[EarlyUnits] = []
        for portion in region.portions:
            position, layer_index = np.divmod(portion.places, len(section.layers))
            chosen = np.flatnonzero((layer_index == index) & wanted[position])
            if chosen.size and not portion.failed:
                units = part.order[position[chosen]]
                found.append(EarlyUnits(units, region.half.rows, portion.batch.buffer_offset[chosen], portion))
        return found

    def drop(self) -> None:
        """Gives up all that was read ahead, of a token that failed or under a plan that ends."""
        for region in self._regions:
            self._drop(region)

    def end_tokens(self) -> None:
        """Gives up what nobody asked for; the seconds that this waited count as the tokens'."""
        if self._regions:
            self._waited(sum(self._drop(region) for region in self._regions))

    def _drop(self, region: _Region) -> float:
        """Empties a region; nothing is written to it any more when it returns. The seconds that this waited."""
        waited_s = sum(portion.ticket.abandon() for portion in region.portions)
        region.section, region.used_bytes = None, 0
        region.portions.clear()
        return waited_s

    def _waited(self, waited_s: float) -> None:
        for ended in self._observers.ended:
            ended(Purpose.AHEAD, 0, 0, waited_s)


def _following(sections: Sequence[Section]) -> dict[Key, tuple[Section, Section]]:
    """(layer, family) -> its section and the one that is read ahead meanwhile, of families that can be guessed."""
    found: dict[Key, tuple[Section, Section]] = {}
    for family in guessed_families(dict.fromkeys(section.family for section in sections)):
        of_family = [section for section in sections if section.family == family]
        for section, following in itertools.pairwise(of_family):
            found |= {(layer, family): (section, following) for layer in section.layers}
    return found


def most_certain(ids: np.ndarray, signal: np.ndarray, share: float) -> np.ndarray:
    """A `share` of `ids`, int32 ascending, at least one of them: those at which any token's `signal`, float32 [T, n],
    is largest; ties go to the lower id."""
    count = max(1, math.ceil(share * ids.size))
    if count >= ids.size:
        return ids
    sizes = np.abs(signal[:, ids]).max(axis=0)
    least = np.partition(sizes, ids.size - count)[ids.size - count]
    chosen = sizes > least
    tied = np.flatnonzero(sizes == least)[: count - np.count_nonzero(chosen)]
    chosen[tied] = True
    return ids[chosen]
