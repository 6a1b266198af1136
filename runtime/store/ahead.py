"""Units that are read before they are asked for (ActiveFlow 3, Figs. 8-11): where they land, and who takes them.

What a later layer asks for is guessed from this layer's input (runtime/decoder/ahead.py); the store begins the reads
and goes on (runtime/store/store.py). They land in a buffer of their own, inside the DRAM budget: a region of it for
each family, or two in turn where layers lie in groups, since a group is still in use while the next one is read. One
read brings a unit's parts of all layers of a group. A fetch takes what it asks for from there and reads the rest; what
nobody asks for is lost when the next section takes its place, or the token is over. A read that failed counts as not
made: whoever asks for its units reads them again, so that damage shows where, and only where, it matters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.artifact.errors import DeviceError
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.flash import Ticket
from coldpress.runtime.store import planner
from coldpress.runtime.store.ahead_room import Key, divided, rooms
from coldpress.runtime.store.reads import Half, longest_read_bytes
from coldpress.runtime.store.slots import Part
from coldpress.schemas.errors import CorruptPageError
from coldpress.schemas.families import FamilyName
from coldpress.schemas.layout import Plan, Section

MAX_REGION_BYTES = 1 << 30
"""More is not used: places in it are numbers of 32 bits."""


@dataclass
class _Portion:
    """Reads ahead that were begun together."""

    batch: planner.Batch
    places: np.ndarray
    """int64 [m] ascending: position * layers of the section + layer of the section, of each unit in the batch."""
    start: int
    """Where in its region they land."""
    ticket: Ticket
    failed: bool = False

    def wait(self, count: int) -> bool:
        """Whether the first `count` reads came; returns when they have."""
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
    portions: list[_Portion] = field(default_factory=list)


@dataclass
class Piece:
    """Units of a request that were read ahead together."""

    units: np.ndarray
    """int32 [k], in flash order."""
    rows: np.ndarray
    """uint8 [m, unit_bytes]; rows may overlap."""
    _offsets: np.ndarray
    """int64 [k], bytes from the portion's start."""
    _portion: _Portion
    num_read: int = 0
    """So many of them are in memory and were given out."""

    def give_up(self) -> np.ndarray:
        """The units that did not come, which are the caller's business from now on."""
        lost, self.num_read = self.units[self.num_read :], self.units.size
        return lost

    def arrivals(self, least_bytes: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(units, their rows' numbers, int32 both) as they arrive, `least_bytes` read between two at least; fewer than
        all where a read failed."""
        batch = planner.Batch(self._portion.batch.extents, 0, self._offsets)
        for first, stop, count in planner.arrivals(batch, self.rows.shape[1], least_bytes):
            if not self._portion.wait(count):
                return
            self.num_read = stop
            yield self.units[first:stop], (self._portion.start + self._offsets[first:stop]).astype(np.int32)


def _region(size: int, unit_bytes: int) -> _Region:
    memory = _native.aligned_buffer(size)
    return _Region(Half(memory, np.lib.stride_tricks.sliding_window_view(memory, unit_bytes)))


class Preloads:
    """What was read ahead and not yet asked for."""

    def __init__(self, plan: Plan, sections: Sequence[Section], page_bytes: int) -> None:
        """Allocates the buffer.

        Args:
            plan: Its `preload_buffer_bytes` are divided among families as they need them; 0 for no reading ahead.
            sections: All of the artifact.
            page_bytes: Size of a page.
        """
        self._page_bytes, self._gap_bytes = page_bytes, plan.collapse_gap_bytes
        self._sections = {(layer, section.family): section for section in sections for layer in section.layers}
        self._regions: list[_Region] = []
        self._region_of: dict[Key, _Region] = {}
        found = rooms(sections, plan.parts, page_bytes) if plan.preload_buffer_bytes else {}
        for family, granted in divided(found, plan.preload_buffer_bytes, page_bytes).items():
            granted, copies = min(granted, MAX_REGION_BYTES), found[family].copies
            own = [section for section in sections if section.family == family]
            if granted < span_bytes(own[0].unit_bytes, page_bytes):
                continue
            regions = [_region(granted, own[0].unit_bytes) for _ in range(copies)]
            self._regions += regions
            for index, section in enumerate(own):
                self._region_of |= {(layer, family): regions[index % copies] for layer in section.layers}

    def begin(
        self,
        layer: int,
        family: FamilyName,
        ids: np.ndarray,
        parts: Mapping[Key, Part],
        submit: Callable[[planner.Batch, np.ndarray], Ticket],
    ) -> tuple[planner.Batch | None, float]:
        """Begins to read what is missing of `ids` in all layers of the section of `layer`, as far as there is room.

        Args:
            layer: Any of the section's.
            family: Family on flash.
            ids: Unit ids, int32 [k], distinct.
            parts: All of the store.
            submit: Begins reads.

        Returns:
            The reads that were begun, their units being those that they were begun for; and the seconds that were
            waited for what made room.
        """
        region, section = self._region_of.get((layer, family)), self._sections[layer, family]
        if region is None:
            return None, 0.0
        waited_s = self._drop(region) if region.section is not section else 0.0
        region.section = section
        places = self._places(section, ids, parts, region)
        room = region.half.memory.size - region.used_bytes
        units = planner.Strided(section.offset_bytes, section.unit_bytes, section.unit_bytes)
        if room < span_bytes(section.unit_bytes, self._page_bytes) or not places.size:
            return None, waited_s
        longest = longest_read_bytes(room, section.unit_bytes, self._page_bytes)
        places = places[: room // section.unit_bytes + 1]  # no room for more
        planned = planner.plan_reads(units, places, self._page_bytes, self._gap_bytes, longest)
        batch = next(planner.batches(planned, room))
        start, region.used_bytes = region.used_bytes, region.used_bytes + batch.extents.num_bytes
        try:
            ticket = submit(batch, region.half.memory[start : region.used_bytes])
        except (CorruptPageError, DeviceError):  # of a device that reads at once
            return None, waited_s
        region.portions.append(_Portion(batch, places[: batch.buffer_offset.size], start, ticket))
        return batch, waited_s

    def _places(self, section: Section, ids: np.ndarray, parts: Mapping[Key, Part], region: _Region) -> np.ndarray:
        """Which parts of units are in no memory, int64 ascending, see `_Portion.places`."""
        layers = section.layers
        own = [parts[layer, section.family] for layer in layers]
        missing = [part.position[ids[~part.cache.contains(ids)]].astype(np.int64) for part in own]
        places = [positions * len(layers) + index for index, positions in enumerate(missing)]
        found = np.sort(np.concatenate(places))
        for portion in region.portions:
            found = np.setdiff1d(found, portion.places, assume_unique=True)
        return found

    def take(self, layer: int, family: FamilyName, misses: np.ndarray, part: Part) -> list[Piece]:
        """What of `misses`, int32 ids, was read ahead; it stays until another section's turn comes."""
        region, section = self._region_of.get((layer, family)), self._sections[layer, family]
        if region is None or region.section is not section:
            return []
        index, wanted = layer - section.first_layer, np.zeros(part.order.size, bool)
        wanted[part.position[misses]] = True
        found = []
        for portion in region.portions:
            position, its_layer = np.divmod(portion.places, len(section.layers))
            its = np.flatnonzero((its_layer == index) & wanted[position])
            if its.size and not portion.failed:
                units = part.order[position[its]]
                found.append(Piece(units, region.half.rows, portion.batch.buffer_offset[its], portion))
        return found

    def drop(self) -> float:
        """Gives up all that was read ahead; nothing is written to the buffer any more when it returns. The seconds that
        were waited for it."""
        return sum(self._drop(region) for region in self._regions)

    def _drop(self, region: _Region) -> float:
        waited_s = sum(portion.ticket.abandon() for portion in region.portions)
        region.section, region.used_bytes = None, 0
        region.portions.clear()
        return waited_s
