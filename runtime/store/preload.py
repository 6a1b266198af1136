"""Preloading: units are read before they are asked for (ActiveFlow 3, Figs. 8-11).

Inputs change little from layer to layer, so the next section's selector, given this layer's input, already chooses most
of the units that it will choose later. The store guesses after the current layer has received all its units, so that
needed reads come before guessed ones. If each section holds one layer, a layer preloads for the next layer. If
sections hold N layers, each layer of a group reads its share of the next group, with the newest input. A guess costs
one more selection per section, by a selector that reads the layer's input directly; no matrix is multiplied for it. A
plan may read only the largest entries of the input, which are the most likely to be large in the next layer, too.

The reads land in a separate buffer inside the DRAM budget: one region per family, or two used in turn if layers lie in
groups, because a group is still in use while the next one is read. One read brings a unit's parts of all layers of a
group. A request takes its units from the region and reads the rest; the store drops unused units when the next section
takes the region, or when the token ends. Where a token uses every unit nothing is guessed: the last layer preloads
for the next token's first one, while the head computes and while drafts are made. A failed preload counts as not
made: a request for its units reads them again, so damage is reported only if a token needs the damaged bytes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coldpress.runtime.artifact.errors import DeviceError
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.flash import Ticket
from coldpress.runtime.sparsity import Residency
from coldpress.runtime.store import planner
from coldpress.runtime.store.facts import Key, Observers, PreloadFacts, Purpose
from coldpress.runtime.store.preload_room import divided, first_batch, following, reads_on, rooms
from coldpress.runtime.store.slots import Part
from coldpress.runtime.unit_numbers import distinct
from coldpress.schemas.errors import CorruptPageError
from coldpress.schemas.families import FAMILIES, FamilyName
from coldpress.schemas.layout import Plan, Section

MAX_REGION_BYTES = 1 << 30
"""Largest region that is used, because offsets in a region are 32-bit numbers."""


Choose = Callable[[Key, np.ndarray, Residency], tuple[list[np.ndarray], np.ndarray]]
"""A layer and family, an earlier layer's input, float32 [T, hidden_size], and where the units are -> the ids that each
token would use, int32 ascending, and the signal that the selector sees, float32 [T, n]."""


@dataclass
class _Portion:
    batch: planner.ReadBatch
    places: np.ndarray
    """int64 [m] ascending: position * num_layers + layer index within the section, for each unit in the batch."""
    start: int
    """Offset in the region at which the batch lands, bytes."""
    ticket: Ticket
    failed: bool = False

    def wait(self, count: int) -> bool:
        """Waits for the first `count` reads and returns whether they succeeded."""
        try:
            if not self.failed:
                self.ticket.wait(count)
        except (CorruptPageError, DeviceError):
            self.failed = True
        return not self.failed


@dataclass
class _Region:
    memory: np.ndarray
    section: Section | None = None
    used_bytes: int = 0
    portions: list[_Portion] = field(default_factory=list[_Portion])


@dataclass
class PreloadedUnits:
    ids: np.ndarray
    """int32 [k], in flash order."""
    rows: np.ndarray
    """uint8 [m, unit_bytes]; rows may overlap."""
    _offsets: np.ndarray
    """int64 [k], bytes from the portion's start."""
    _portion: _Portion
    num_read: int = 0
    """Units that have arrived and were handed out."""

    def give_up(self) -> np.ndarray:
        """Returns the units whose reads failed; the caller reads them itself."""
        lost, self.num_read = self.ids[self.num_read :], self.ids.size
        return lost

    def arrivals(self, least_bytes: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (ids, row numbers), both int32, as units arrive, with at least `least_bytes` read between two yields.
        Stops early if a read fails."""
        batch = planner.ReadBatch(self._portion.batch.extents, 0, self._offsets)
        for first, stop, count in planner.arrivals(batch, self.rows.shape[1], least_bytes):
            if not self._portion.wait(count):
                return
            self.num_read = stop
            yield self.ids[first:stop], (self._portion.start + self._offsets[first:stop]).astype(np.int32)


class Preloader:
    def __init__(
        self,
        plan: Plan,
        sections: Sequence[Section],
        page_bytes: int,
        parts: Mapping[Key, Part],
        begin: Callable[[Purpose, planner.ReadBatch, np.ndarray], Ticket],
        zeros: Callable[[int], np.ndarray],
        observers: Observers,
    ) -> None:
        """Allocates the buffer.

        Args:
            plan: Gives `preload_buffer_bytes`, divided among families by need; 0 turns preloading off.
            begin: Begins the reads of a batch into memory.
            zeros: Returns memory to read into, so many bytes.
        """
        self.enabled = plan.preload_buffer_bytes > 0
        self._page_bytes, self._gap_bytes, self._guess = page_bytes, plan.collapse_gap_bytes, plan.preload_guess
        self._parts, self._begin_reads, self._observers = parts, begin, observers
        self._sections = {(layer, section.family): section for section in sections for layer in section.layers}
        self._is_certain = self.enabled and reads_on(plan, sections)
        self._following = following(sections, wraps=self._is_certain) if self.enabled else {}
        self._regions: list[_Region] = []
        self._region_of: dict[Key, _Region] = {}
        found = rooms(sections, plan.parts, page_bytes) if self.enabled else {}
        for family, granted in divided(found, plan.preload_buffer_bytes, page_bytes).items():
            granted, copies = min(granted, MAX_REGION_BYTES), found[family].copies
            of_family = [section for section in sections if section.family == family]
            if granted < span_bytes(max(section.unit_bytes for section in of_family), page_bytes):
                continue
            regions = [_Region(zeros(granted)) for _ in range(copies)]
            self._regions += regions
            for index, section in enumerate(of_family):
                self._region_of |= {(layer, family): regions[index % copies] for layer in section.layers}

    def layer_done(self, layer: int, inputs: Mapping[FamilyName, np.ndarray], choose: Choose) -> None:
        """Begins to read the units that the next sections will probably ask for, after a layer has all its own units.

        `inputs` has, by family in the order of the layer's requests, the input of attention or of the MLP, float32
        [T, hidden_size], that the family's units were chosen with. `choose` chooses another layer's units for it.
        """
        for family, signal in inputs.items():
            if (layer, family) not in self._following:
                continue
            section, following = self._following[layer, family]
            key = following.first_layer, family
            if self._is_certain:
                self.begin(key, np.arange(following.num_units, dtype=np.int32))
                continue
            chosen, all_seen = list[np.ndarray](), list[np.ndarray]()
            for target in following.layers:
                part = self._parts[target, family]
                ids, seen = choose((target, family), signal, Residency(part.cache.present, part.position))
                chosen += ids
                all_seen.append(seen)
            ids = distinct(np.concatenate(chosen))
            if FAMILIES[family].axis == "hidden_size":
                ids = most_certain(ids, np.concatenate(all_seen), self._guess)
            position = self._parts[key].position[ids].astype(np.int64)
            # each layer of a group reads one slice of the next section's flash range, so no unit is guessed twice
            share = position * len(section.layers) // following.num_units == layer - section.first_layer
            self.begin(key, ids[share])

    def begin(self, key: Key, ids: np.ndarray) -> None:
        """Begins to read units that a later request of this token will probably ask for, and returns at once.

        The cache does not change, and does not count this as a use. Units, distinct and ascending, that do not fit the
        buffer are not read. The missing parts of the units are read for all layers of the section, whose first one is
        in `key`.
        """
        batch = self._begin(key, ids)
        facts = PreloadFacts(key, ids, self._sections[key].unit_bytes, batch)
        for preloaded in self._observers.preloaded:
            preloaded(facts)

    def _begin(self, key: Key, ids: np.ndarray) -> planner.ReadBatch | None:
        region, section = self._region_of.get(key), self._sections[key]
        if region is None:
            return None
        if region.section is not section:
            self._waited(self._drop(region))
        region.section = section
        places = self._places(section, ids, region)
        room = region.memory.size - region.used_bytes
        units = planner.Strided(section.offset_bytes, section.unit_bytes, section.unit_bytes)
        if room < span_bytes(section.unit_bytes, self._page_bytes) or not places.size:
            return None
        batch = first_batch(units, places, self._page_bytes, self._gap_bytes, room)
        start, region.used_bytes = region.used_bytes, region.used_bytes + batch.extents.num_bytes
        try:
            ticket = self._begin_reads(Purpose.PRELOAD, batch, region.memory[start : region.used_bytes])
        except (CorruptPageError, DeviceError):  # flash/serial.py reads inside `submit`; a failed guess is no error
            return None
        region.portions.append(_Portion(batch, places[: batch.buffer_offset.size], start, ticket))
        return batch

    def _places(self, section: Section, ids: np.ndarray, region: _Region) -> np.ndarray:
        """Returns the places (`_Portion.places`) of unit parts neither cached nor preloaded, int64 ascending."""
        layers = section.layers
        parts = [self._parts[layer, section.family] for layer in layers]
        missing = [part.position[ids[~part.cache.contains(ids)]].astype(np.int64) for part in parts]
        places = [positions * len(layers) + index for index, positions in enumerate(missing)]
        found = np.sort(np.concatenate(places))
        for portion in region.portions:
            found = found[np.isin(found, portion.places, assume_unique=True, invert=True)]
        return found

    def take(self, key: Key, misses: np.ndarray) -> list[PreloadedUnits]:
        """Returns the units of `misses`, int32 ids, that were preloaded; they stay until the region is reused."""
        region, section = self._region_of.get(key), self._sections[key]
        if region is None or region.section is not section:
            return []
        part = self._parts[key]
        num_rows = region.memory.size - section.unit_bytes + 1
        rows = np.ndarray((num_rows, section.unit_bytes), np.uint8, region.memory, strides=(1, 1))  # one at each byte
        index, wanted = key[0] - section.first_layer, np.zeros(part.order.size, bool)
        wanted[part.position[misses]] = True
        found: list[PreloadedUnits] = []
        for portion in region.portions:
            position, layer_index = np.divmod(portion.places, len(section.layers))
            chosen = np.flatnonzero((layer_index == index) & wanted[position])
            if chosen.size and not portion.failed:
                units = part.units_at(position[chosen])
                found.append(PreloadedUnits(units, rows, portion.batch.buffer_offset[chosen], portion))
        return found

    def drop(self) -> None:
        for region in self._regions:
            self._drop(region)

    def close(self) -> None:
        self.drop()
        self._regions.clear()
        self._region_of.clear()

    def end_tokens(self) -> None:
        """Drops the units that no request took, unless the next token's first layer will; the seconds spent waiting for
        their reads count for these tokens."""
        if self._regions and not self._is_certain:
            self._waited(sum(self._drop(region) for region in self._regions))

    def _drop(self, region: _Region) -> float:
        """Empties a region and returns the seconds waited; no read writes to the region afterwards."""
        waited_s = sum(portion.ticket.abandon() for portion in region.portions)
        region.section, region.used_bytes = None, 0
        region.portions.clear()
        return waited_s

    def _waited(self, waited_s: float) -> None:
        for ended in self._observers.ended:
            ended(Purpose.PRELOAD, 0, 0, waited_s)


def most_certain(ids: np.ndarray, signal: np.ndarray, share: float) -> np.ndarray:
    """Returns the `share` of `ids`, at least one, with the largest |signal| of any token; ties go to the lower id.
    `ids` ascend; `signal` is float32 [T, n], indexed by id."""
    count = max(1, math.ceil(share * ids.size))
    if count >= ids.size:
        return ids
    sizes = np.abs(signal[:, ids]).max(axis=0)
    least = np.partition(sizes, ids.size - count)[ids.size - count]
    chosen = sizes > least
    tied = np.flatnonzero(sizes == least)[: count - np.count_nonzero(chosen)]
    chosen[tied] = True
    return ids[chosen]
