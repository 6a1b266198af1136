"""Models seconds, for the whole compiler: the time of requests for units on a device, with a cache, buffer and gap.

`simulated` drives the runtime's own store on simulated flash (runtime/simulate.py) before any weight is on flash:
cache, slots, read plan, preloading and clock are those of a run. It is the law: code that judges a choice by seconds
calls it, or calls `Reading`, the form for searches that count many requests of one family: the same planner and the
same law of one request, without a store. tests/compiler/test_seconds.py checks that the two are equal, and
tests/compiler/test_order_cost.py does so for the compiled form in `order`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from coldpress.compiler.cost_model import HasShapes, resident_tensors, unit_bytes
from coldpress.compiler.io import load_arrays
from coldpress.compiler.sections import image_bytes, row_tables
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.quantization._mixed import coarsest
from coldpress.runtime.simulate import Choose, simulate, simulate_choices, times_traced, token_seconds_of
from coldpress.runtime.store import planner
from coldpress.runtime.store.clock import arrival
from coldpress.runtime.store.computing import Arrival, weight_seconds
from coldpress.runtime.store.facts import Key
from coldpress.runtime.store.planner import longest_read_bytes, room_bytes
from coldpress.runtime.trace import END, FETCH, NO_IDS, Event
from coldpress.schemas import __version__
from coldpress.schemas.device import DeviceProfile, Flash
from coldpress.schemas.families import Formats, slices
from coldpress.schemas.layout import Plan, Section
from coldpress.schemas.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    FamilyFormat,
    Features,
    FlashImage,
    Format,
    Manifest,
    Source,
)
from coldpress.schemas.metrics import RunMetrics
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement

NO_DIGEST = "0" * 64
WORTH = 0.985
"""A change of a plan must bring a token's time, or its misses, below this share: other text differs from that on which
it was chosen."""
FILLING = 8
"""Requests that fill the caches before a run is counted."""


# A run before there are weights


@dataclass(frozen=True)
class Setting:
    model: HasShapes
    formats: Formats
    device: DeviceProfile
    sections: tuple[Section, ...]
    """All sections of flash.img (compiler/sections.py)."""
    plan: Plan
    """Cache, gap, buffers, and pins of each part. The parts may cover some layers only, which then stand for all."""
    order: Mapping[Key, np.ndarray] = field(default_factory=dict)
    """By a section's first layer and family, int32 [num_units]: the unit at each flash position. Default: the model's
    own order."""
    rank: Mapping[Key, np.ndarray] = field(default_factory=dict)
    """By layer and family, int32 [num_units]: units in the order in which they deserve DRAM. Default: by id."""

    @cached_property
    def manifest(self) -> Manifest:
        spec = self.model.spec
        families, base = tuple(dict.fromkeys(section.family for section in self.sections)), coarsest(self.formats)
        tables = row_tables(spec, self.sections, self.formats)
        return Manifest(
            format=Format(name=FORMAT_NAME, major=FORMAT_MAJOR, minor=FORMAT_MINOR),
            features=Features(required=(), optional=()),
            compiler_version=__version__,
            model=spec,
            source=Source(name="", source="", revision=None, license=None, weights_sha256=NO_DIGEST),
            device=self.device,
            files=(),
            flash=FlashImage(
                size_bytes=image_bytes(self.sections, tables),
                page_bytes=self.device.flash.page_bytes.value,
                sections=self.sections,
                tables=tables,
            ),
            families=tuple(
                FamilyFormat(
                    family=family, format=base, slices=slices(family, spec), unit_bytes=unit_bytes(family, spec, base)
                )
                for family in families
            ),
            resident=resident_tensors(self.model, families, self.formats),
            predictors=(),
            plans=(self.plan,),
            inputs={},
        )

    @cached_property
    def artifact(self) -> Artifact:
        """An open artifact for the store. Simulated flash opens no file, so there is no folder."""
        tables: dict[str, np.ndarray] = {}
        for section in self.sections:
            natural = np.arange(section.num_units, dtype=np.int32)
            key = section.first_layer, section.family
            tables[f"order.{key[0]}.{key[1]}"] = self.order.get(key, natural)
            for layer in section.layers:
                tables[f"rank.{layer}.{section.family}"] = self.rank.get((layer, section.family), natural)
        return Artifact("", NO_DIGEST, self.manifest, {}, (), cast(Any, None), tables)


def built_orders(order: Iterable[Order]) -> dict[Key, np.ndarray]:
    entries = (entry for part in order for entry in part.entries)
    return {(entry.layer, entry.family): load_arrays(entry.arrays, "order")["order"] for entry in entries}


def built_ranks(placement: Placement, sections: Iterable[Section]) -> dict[Key, np.ndarray]:
    found = load_arrays(placement.arrays)
    keys = ((layer, section.family) for section in sections for layer in section.layers)
    return {(layer, family): found[f"rank.{layer}.{family}"] for layer, family in keys}


def filling_requests(rank: np.ndarray) -> list[np.ndarray]:
    """Returns requests that together bring every unit once, int32 ids ascending each, the units most worth DRAM last.
    `rank` is that of `Setting`, int32 [num_units]."""
    return [np.sort(ids).astype(np.int32) for ids in np.array_split(rank[::-1], FILLING)]


def requests_of(tokens: Iterable[Mapping[Key, np.ndarray]], first: int = 1) -> list[Event]:
    """Returns the trace of tokens that request these units, ids ascending, in the order of the mapping's keys; `first`
    is the first token's number."""
    trace: list[Event] = []
    for number, asked in enumerate(tokens, start=first):
        trace += [Event(FETCH, number, layer, family, ids.astype(np.int32)) for (layer, family), ids in asked.items()]
        trace.append(Event(END, number, 0, next(iter(asked))[1], NO_IDS))
    return trace


def simulated(setting: Setting, trace: Sequence[Event], before: Sequence[Event] = ()) -> RunMetrics:
    """Returns the counts and modelled seconds of a run of `trace`; `before` only fills caches and is not counted."""
    return simulate(setting.artifact, setting.plan, trace, before)


def token_seconds(setting: Setting, trace: Sequence[Event], before: Sequence[Event] = ()) -> float:
    """Returns modelled seconds of a token of `trace`: its requests, computing, and the plan's predictors. The requests
    for the layers of the plan's parts stand for those of all layers."""
    return of_all_layers(setting, simulated(setting, trace, before))


def choices_seconds(
    setting: Setting, choose: Choose, windows: Sequence[range], num_warm: int, fill: Mapping[Key, np.ndarray]
) -> tuple[float, float]:
    """Returns modelled seconds of a token, as `token_seconds`, and the hit rate, while a selector chooses with the
    cache as it is then. The arguments are those of `coldpress.runtime.simulate.simulate_choices`; a token's figures are
    means over windows of equal length."""
    found = list(simulate_choices(setting.artifact, setting.plan, choose, windows, num_warm, fill))
    hits, misses = sum(one.hits for one in found), sum(one.misses for one in found)
    return sum(of_all_layers(setting, one) for one in found) / len(found), hits / max(1, hits + misses)


class TokenCost(NamedTuple):
    token_s: float
    flash_s: float
    """Seconds of its reads alone."""
    reads: float
    read_bytes: float
    hits: int
    """Units of the plan's parts that were in DRAM, and those that were not."""
    misses: int


def choices_tokens(
    setting: Setting, choose: Choose, windows: Sequence[range], num_warm: int, fill: Mapping[Key, np.ndarray]
) -> list[TokenCost]:
    """Returns each counted token's own figures, in the run whose means `choices_seconds` returns."""
    tokens = [(token, number >= num_warm) for window in windows for number, token in enumerate(window)]
    alone = [range(token, token + 1) for token, _ in tokens]
    found = simulate_choices(setting.artifact, setting.plan, choose, alone, 0, fill)
    times = times_traced(setting.manifest, setting.plan)
    return [
        TokenCost(
            of_all_layers(setting, one),
            times * one.modelled_flash_s,
            times * one.reads,
            times * one.read_bytes,
            one.hits,
            one.misses,
        )
        for one, (_, counted) in zip(found, tokens, strict=True)
        if counted
    ]


def of_all_layers(setting: Setting, found: RunMetrics) -> float:
    """Returns modelled seconds of a token of a simulated run; the layers of the plan's parts stand for all."""
    predicting_s = weight_seconds(setting.device, coarsest(setting.formats), setting.plan.predictor_bytes)
    return token_seconds_of(setting.manifest, setting.plan, found, predicting_s)


# One family's requests, for searches


class Reads(NamedTuple):
    num_reads: int
    num_bytes: int
    """Bytes read, pages and gaps included."""
    arrival: Arrival

    @property
    def flash_s(self) -> float:
        return self.arrival.flash_s


@dataclass(frozen=True)
class Reading:
    """Plans the reads of one family of one layer as the store does, without a store."""

    flash: Flash
    """The device's flash, with as many reads in flight as the plan has."""
    units: planner.Strided
    gap_bytes: int
    """Reads join over gaps of at most this many bytes."""
    buffer_bytes: int
    """Bytes of the read buffer: at least those that one unit may take."""

    @cached_property
    def room_bytes(self) -> int:
        """The part of the read buffer that is read into at a time."""
        page_bytes = self.flash.page_bytes.value
        return room_bytes(self.buffer_bytes, page_bytes, span_bytes(self.units.unit_bytes, page_bytes))

    def reads(self, positions: np.ndarray) -> Reads:
        """Returns the reads of the units at `positions`, integers [k], distinct and ascending flash positions."""
        page_bytes = self.flash.page_bytes.value
        longest = longest_read_bytes(self.room_bytes, self.units.unit_bytes, page_bytes)
        plan = planner.plan_reads(self.units, positions, page_bytes, self.gap_bytes, longest)
        arriving = arrival(self.flash, plan, self.buffer_bytes, self.room_bytes)
        return Reads(len(plan.extents), plan.extents.num_bytes, arriving)

    def replay(self, cache: CachePolicy, tokens: Iterable[np.ndarray], num_warm: int = 0) -> Iterator[float]:
        """Yields flash seconds of each token: one request per token, unit ids are flash positions, integers [k],
        distinct and ascending. The cache keeps its present contents; the first `num_warm` tokens only fill it, and
        yield no seconds."""
        for number, ids in enumerate(tokens):
            missing = ids[~cache.serve(ids)]
            if number >= num_warm:
                yield self.reads(missing).flash_s
