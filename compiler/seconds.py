"""The one model of seconds: what requests for units take on a device, under a cache, a read buffer and a gap.

`simulated` drives the runtime's own store on simulated flash (runtime/simulate.py), before there is any weight on
flash: cache, slots, read plan, reading ahead and clock are those of a run. It is the law; whatever judges a choice by
seconds asks it, or asks `Reading`, the form for searches that count many requests of one family: the same planner and
the same law of one request, without a store around them. tests/compiler/test_seconds.py holds the two equal, and
tests/compiler/test_order_cost.py the compiled form that `order` needs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from coldpress.compiler.cost_model import HasShapes, resident_tensors
from coldpress.compiler.sections import image_bytes
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.simulate import simulate
from coldpress.runtime.store import planner
from coldpress.runtime.store.clock import computed_bytes, dram_seconds, modelled_flash_s
from coldpress.runtime.store.reads import longest_read_bytes, room_bytes
from coldpress.runtime.trace import END, FETCH, NO_IDS, Event
from coldpress.schemas import __version__
from coldpress.schemas.device import DeviceProfile, Flash
from coldpress.schemas.families import FamilyName, FormatName, slices
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

Key = tuple[int, FamilyName]
"""Layer and family."""
NO_DIGEST = "0" * 64


# A run before there are weights


@dataclass(frozen=True)
class Setting:
    """What decides how long requests take."""

    model: HasShapes
    format: FormatName
    device: DeviceProfile
    sections: tuple[Section, ...]
    """All of flash.img (compiler/sections.py)."""
    plan: Plan
    """Cache, gap, buffers, and what each part pins. Its parts may be those of some layers, which stand for all."""
    order: Mapping[Key, np.ndarray] = field(default_factory=dict)
    """By a section's first layer and family, int32 [num_units]: the unit at each flash position. The model's own order
    where there is none."""
    rank: Mapping[Key, np.ndarray] = field(default_factory=dict)
    """By layer and family, int32 [num_units]: units in the order in which they deserve DRAM. By id where there is
    none."""

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of an artifact that has no file yet."""
        spec = self.model.spec
        unit_bytes = {section.family: section.unit_bytes for section in self.sections}
        return Manifest(
            format=Format(name=FORMAT_NAME, major=FORMAT_MAJOR, minor=FORMAT_MINOR),
            features=Features(required=(), optional=()),
            compiler_version=__version__,
            model=spec,
            source=Source(name="", source="", revision=None, license=None, weights_sha256=NO_DIGEST),
            device=self.device,
            files=(),
            flash=FlashImage(
                size_bytes=image_bytes(self.sections),
                page_bytes=self.device.flash.page_bytes.value,
                sections=self.sections,
            ),
            families=tuple(
                FamilyFormat(family=family, format=self.format, slices=slices(family, spec), unit_bytes=size)
                for family, size in unit_bytes.items()
            ),
            resident=resident_tensors(self.model, tuple(unit_bytes), self.format),
            predictors=(),
            plans=(self.plan,),
            inputs={},
        )

    @cached_property
    def artifact(self) -> Artifact:
        """What the store takes for an open artifact. Simulated flash opens no file, so that there is no folder."""
        tables: dict[str, np.ndarray] = {}
        for section in self.sections:
            natural = np.arange(section.num_units, dtype=np.int32)
            key = section.first_layer, section.family
            tables[f"order.{key[0]}.{key[1]}"] = self.order.get(key, natural)
            for layer in section.layers:
                tables[f"rank.{layer}.{section.family}"] = self.rank.get((layer, section.family), natural)
        return Artifact("", NO_DIGEST, self.manifest, {}, (), cast(Any, None), tables)


def requests_of(tokens: Iterable[Mapping[Key, np.ndarray]]) -> list[Event]:
    """The trace of tokens that ask for these units, ids ascending by layer and family, in the order of the mapping."""
    trace: list[Event] = []
    for number, asked in enumerate(tokens, start=1):
        trace += [Event(FETCH, number, layer, family, ids.astype(np.int32)) for (layer, family), ids in asked.items()]
        trace.append(Event(END, number, 0, next(iter(asked))[1], NO_IDS))
    return trace


def simulated(setting: Setting, trace: Sequence[Event], before: Sequence[Event] = ()) -> RunMetrics:
    """What a run of `trace` counts, and its modelled seconds; what came `before` it fills caches and is not counted."""
    return simulate(setting.artifact, setting.plan, trace, before)


def token_seconds(setting: Setting, trace: Sequence[Event], before: Sequence[Event] = ()) -> float:
    """Modelled seconds of a token of `trace`: its requests, computing, and predictors, of which a plan says the bytes.

    The requests for the layers of the plan's parts stand for those of all layers.
    """
    found, device = simulated(setting, trace, before), setting.device
    computed = dram_seconds(device, computed_bytes(setting.manifest, setting.plan), 1)
    requests_s = found.modelled_s / found.num_tokens - computed
    num_layers = len({part.layer for part in setting.plan.parts})
    predicting = dram_seconds(device, setting.plan.predictor_bytes, 1)
    return requests_s * setting.model.spec.num_hidden_layers / num_layers + computed + predicting


# One family's requests, for searches


class Reads(NamedTuple):
    """What one request reads."""

    num_reads: int
    num_bytes: int
    """Pages and gaps included."""
    flash_s: float


@dataclass(frozen=True)
class Reading:
    """How requests for one family of one layer are read: as the store reads them, without a store."""

    flash: Flash
    """With as many reads in flight as the plan has."""
    units: planner.Strided
    gap_bytes: int
    """Reads at most this far apart become one."""
    buffer_bytes: int
    """The read buffer, at least what one unit may take."""

    @cached_property
    def room_bytes(self) -> int:
        """What of the read buffer is read into at a time."""
        page_bytes = self.flash.page_bytes.value
        return room_bytes(self.buffer_bytes, page_bytes, span_bytes(self.units.unit_bytes, page_bytes))

    def reads(self, positions: np.ndarray) -> Reads:
        """What it takes to bring the units at `positions`, integers [k], distinct and ascending flash positions."""
        page_bytes = self.flash.page_bytes.value
        longest = longest_read_bytes(self.room_bytes, self.units.unit_bytes, page_bytes)
        plan = planner.plan_reads(self.units, positions, page_bytes, self.gap_bytes, longest)
        flash_s = modelled_flash_s(self.flash, plan, self.buffer_bytes, self.room_bytes)
        return Reads(len(plan.extents), plan.extents.num_bytes, flash_s)

    def replay(self, cache: CachePolicy, tokens: Iterable[np.ndarray], num_warm: int = 0) -> Iterator[float]:
        """Flash seconds of each token, which asks for units whose ids are their flash positions in one request.

        Args:
            cache: Of the family; it goes on from what it holds.
            tokens: Per token integers [k], distinct and ascending.
            num_warm: The first tokens fill the cache, and have no seconds.
        """
        for number, ids in enumerate(tokens):
            missing = ids[~cache.serve(ids)]
            if number >= num_warm:
                yield self.reads(missing).flash_s
