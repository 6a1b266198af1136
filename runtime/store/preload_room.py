"""Computes how much a plan preloads (ActiveFlow 3): pure arithmetic on its parts and on the device's law.

Preloads are free while the device would idle: while a layer computes with resident weights and no request waits.
Further reads only delay the next request, and each takes DRAM that could cache units. So the buffer holds as much as
the law says can be read in the idle time, and never more than the whole guess. If it holds less, only the most certain
part of a guess is read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from coldpress.runtime.dram.budget import fixed_bytes
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.runtime.store import planner
from coldpress.runtime.store.facts import Key
from coldpress.runtime.store.planner import MAX_READ_BYTES, longest_read_bytes
from coldpress.runtime.store.resident import seconds_before
from coldpress.schemas.device import Flash, flash_seconds
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FAMILIES, FamilyName, Signal
from coldpress.schemas.layout import PartPlan, Plan, Preload, Section
from coldpress.schemas.manifest import Manifest

GUESSED: tuple[Signal, ...] = ("mlp_input", "attention_input")
"""Signals that change little from layer to layer, because a layer adds little to its input (ActiveFlow 2.2)."""

MOST_SHARE = 0.25
"""Largest share of the units' DRAM that the buffer may take: a cached unit is read once, a preloaded one every time."""
USUAL_GUESS = 0.75
"""Share of a guess that is preloaded if nobody has measured how good the guess is."""


class Preloading(NamedTuple):
    buffer_bytes: int
    guess: float
    """Fraction of guessed units to read, most certain first."""

    @property
    def fields(self) -> dict[str, object]:
        return {"preload_buffer_bytes": self.buffer_bytes, "preload_guess": self.guess}


NOTHING = Preloading(0, 1.0)


class Room(NamedTuple):
    section_bytes: int
    """Most bytes that the guess for one section takes, whole pages."""
    copies: int
    """Sections whose guesses are in memory at once."""


def guessed_families(families: Iterable[FamilyName]) -> tuple[FamilyName, ...]:
    """Returns the families that can be guessed: their selector reads the layer's input directly. The other signals are
    products of a layer's own matrices, which say nothing about another layer."""
    return tuple(family for family in families if FAMILIES[family].signal in GUESSED)


def reads_on(plan: Plan, sections: Sequence[Section]) -> bool:
    """Tells whether the last layer preloads for the first one of the next token: its units are known, since a token
    uses all and no router picks some, and no layer of a group still needs the buffer."""
    is_whole = load("coldpress.runtime.sparsity", Selector, plan.method).is_whole
    every_unit = is_whole and all(part.density >= 1 for part in plan.parts)
    return every_unit and all(len(section.layers) == 1 for section in sections)


def following(sections: Iterable[Section], *, wraps: bool) -> dict[Key, tuple[Section, Section]]:
    """Maps (layer, family) to its section and the section to preload meanwhile, for families that can be guessed;
    with `wraps`, the last section to the first one."""
    sections = tuple(sections)
    found: dict[Key, tuple[Section, Section]] = {}
    for family in guessed_families(dict.fromkeys(section.family for section in sections)):
        of_family = [section for section in sections if section.family == family]
        for section, after in pairwise([*of_family, *(of_family[:1] if wraps else ())]):
            found |= {(layer, family): (section, after) for layer in section.layers}
    return found


@dataclass(frozen=True)
class PreloadReads:
    """A plan's way of reading the units that DRAM does not hold."""

    sections: Sequence[Section]
    parts: Sequence[PartPlan]
    flash: Flash
    """The device's law, at the plan's queue depth."""
    gap_bytes: int


def rooms(sections: Sequence[Section], parts: Iterable[PartPlan], page_bytes: int) -> dict[FamilyName, Room]:
    """Returns the room for each family that can be guessed and is not entirely in DRAM."""
    planned = {(part.layer, part.family): part for part in parts}
    found: dict[FamilyName, Room] = {}
    for family in guessed_families(dict.fromkeys(section.family for section in sections)):
        own = [section for section in sections if section.family == family]
        most = max((_most_bytes(section, planned, page_bytes) for section in own[1:]), default=0)
        if most:
            found[family] = Room(most, 2 if any(len(section.layers) > 1 for section in own) else 1)
    return found


def divided(found: Mapping[FamilyName, Room], buffer_bytes: int, page_bytes: int) -> dict[FamilyName, int]:
    """Divides a buffer among families in proportion to need: bytes for one section's guess of each, whole pages."""
    wanted = sum(room.section_bytes * room.copies for room in found.values())
    return {
        family: min(room.section_bytes, room.section_bytes * buffer_bytes // wanted // page_bytes * page_bytes)
        for family, room in found.items()
    }


def first_batch(
    units: planner.Strided, positions: np.ndarray, page_bytes: int, gap_bytes: int, room_bytes: int
) -> planner.ReadBatch:
    """Returns the preloads for the first units at `positions`, int64 ascending, that fit `room_bytes` together."""
    longest = longest_read_bytes(room_bytes, units.unit_bytes, page_bytes)
    some = positions[: room_bytes // units.unit_bytes + 1]  # more cannot fit, so planning them would waste time
    return planner.batches(planner.plan_reads(units, some, page_bytes, gap_bytes, longest), room_bytes)[0]


def most_bytes(sections: Sequence[Section], parts: Iterable[PartPlan], page_bytes: int, free_bytes: int) -> int:
    """Returns the size of the largest useful buffer, whole pages; 0 if nothing can be guessed.

    Units that the parts hold in DRAM are not read. `free_bytes` is DRAM for units and this buffer together, which takes
    at most `MOST_SHARE` of it.
    """
    wanted = sum(room.section_bytes * room.copies for room in rooms(sections, parts, page_bytes).values())
    return max(0, min(wanted, int(MOST_SHARE * free_bytes) // page_bytes * page_bytes))


def buffer_bytes(reading: PreloadReads, idle_s: float, guess: float, free_bytes: int) -> int:
    """Returns how many bytes can be read while the device would idle, whole pages; 0 if nothing can be guessed.

    The buffer has room for at least one unit. In `idle_s` seconds per layer no request waits; of guessed units the
    fraction `guess` is read. See `most_bytes` for `free_bytes`.
    """
    page_bytes, sections = reading.flash.page_bytes.value, reading.sections
    most = most_bytes(sections, reading.parts, page_bytes, free_bytes)
    if not most:
        return 0
    found = rooms(sections, reading.parts, page_bytes)
    typical = {family: _largest(sections, family) for family in found}
    reading_s = sum(_guessed_s(reading, section, guess) / len(section.layers) for section in typical.values())
    share = guess * min(1.0, idle_s / reading_s) if reading_s else guess
    least = max(
        span_bytes(section.unit_bytes, page_bytes) / found[family].section_bytes for family, section in typical.items()
    )
    share = max(share, least)
    return min(
        most, sum((int(share * room) // page_bytes + 1) * page_bytes * copies for room, copies in found.values())
    )


def _largest(sections: Sequence[Section], family: FamilyName) -> Section:
    """Returns a family's section with the most layers; among equals, the first one with the largest units. The family's
    first section is left out, because no section before it could guess it."""
    return max(
        [section for section in sections if section.family == family][1:],
        key=lambda section: (len(section.layers), section.unit_bytes),
    )


def _guessed_s(reading: PreloadReads, section: Section, guess: float) -> float:
    """Returns the seconds to read the guess for all layers of a section if units lie on flash in random order."""
    planned = {(part.layer, part.family): part for part in reading.parts}
    parts, page_bytes = [planned[layer, section.family] for layer in section.layers], reading.flash.page_bytes.value
    density = max(part.density for part in parts)
    chosen = np.flatnonzero(scattered(section.num_units, 0) < guess * density)
    held = [(part.num_pinned + part.cache_slots) / section.num_units for part in parts]
    missing = [
        chosen[scattered(chosen.size, 1 + part.layer) >= share] * len(parts) + index
        for index, (part, share) in enumerate(zip(parts, held, strict=True))
    ]
    units = planner.Strided(section.offset_bytes, section.unit_bytes, section.unit_bytes)
    longest, positions = longest_read_bytes(MAX_READ_BYTES, section.unit_bytes, page_bytes), np.concatenate(missing)
    reads = planner.plan_reads(units, np.sort(positions), page_bytes, reading.gap_bytes, longest).extents
    return float(flash_seconds(reading.flash, len(reads), reads.num_bytes))


def scattered(count: int, seed: int) -> np.ndarray:
    """Returns pseudo-random numbers from 0 to 1, float64 [count], the same on every machine (SplitMix64)."""
    state = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))).astype(np.float64) / 2.0**64


def wanted(manifest: Manifest, plan: Plan, preload: Preload) -> Preloading:
    """Returns a plan's settings for preloading under the user's `preload`: the plan's own, or else `fitting` ones.
    Raises `ColdpressError` if `preload` is on and nothing can be preloaded."""
    if preload == "off":
        return NOTHING
    if plan.preload_buffer_bytes:
        return Preloading(plan.preload_buffer_bytes, plan.preload_guess)
    found = fitting(manifest, plan)
    if not found.buffer_bytes:
        families = ", ".join(entry.family for entry in manifest.families)
        raise ColdpressError(
            f"preload is on, but {families} in {len(manifest.flash.sections)} sections leave nothing to preload: "
            "expected neuron, mlp_in or attn_in of a section after the first, not all in DRAM, and room for a page; "
            "take preload off"
        )
    return found


def fitting(manifest: Manifest, plan: Plan) -> Preloading:
    """Returns settings for a plan that has none: as much as its device reads while resident weights compute."""
    law = manifest.device.flash.issuing(plan.queue_depth)
    reading = PreloadReads(manifest.flash.sections, plan.parts, law, plan.collapse_gap_bytes)
    idle_s = max(seconds_before(manifest, plan).values(), default=0.0)
    found = buffer_bytes(reading, idle_s, USUAL_GUESS, plan.dram_budget_bytes - fixed_bytes(manifest, plan))
    return Preloading(found, USUAL_GUESS) if found else NOTHING


def _most_bytes(section: Section, planned: Mapping[Key, PartPlan], page_bytes: int) -> int:
    """Returns the most bytes that a token's missing units of a section take, with each read rounded out on its own."""
    total = 0
    for layer in section.layers:
        part = planned[layer, section.family]
        missing = -(-part.density * (section.num_units - part.num_pinned - part.cache_slots) // 1)
        total += int(missing) * span_bytes(section.unit_bytes, page_bytes)
    whole = section.length_bytes + page_bytes  # a section may begin and end inside a page
    whole = -(-whole // page_bytes) * page_bytes
    return min(total, whole)
