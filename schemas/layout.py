"""What `layout` computes: every offset of flash.img (made nowhere else), and the plan the runtime follows."""

import math
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from coldpress.schemas.base import Count, Many, Options, PositiveCount, Record, Share
from coldpress.schemas.errors import clipped
from coldpress.schemas.families import PLUGIN_NAME, FamilyName, Method

SECTION_ALIGN_BYTES = 65536
CacheName = Annotated[str, Field(pattern=PLUGIN_NAME)]
"""The name of a file of runtime/cache; one that a runtime does not have is no damage (FORMAT.md, section 7)."""

Collapse = Literal["static", "adaptive"]
Preload = Literal["on", "off"]
KvCacheFormat = Literal["fp16", "int8"]


class Section(Record):
    """One family of consecutive layers on flash: `num_units` units, `stride_bytes` apart from `offset_bytes` on.

    A unit holds a part of `unit_bytes` per layer, one behind another, so a section is `[unit][layer][slice]`
    (ActiveFlow 3, Fig. 9). With one layer the stride is the unit.
    """

    first_layer: Count
    last_layer: Count
    family: FamilyName
    offset_bytes: Count
    num_units: PositiveCount
    unit_bytes: PositiveCount
    """Bytes of one layer's part of a unit."""
    stride_bytes: PositiveCount
    """Bytes from one unit to the next: all layers' parts."""

    @property
    def layers(self) -> range:
        """The layers whose units lie here."""
        return range(self.first_layer, self.last_layer + 1)

    @property
    def name(self) -> str:
        """What lies here, in words."""
        last = f" to {self.last_layer}" if self.last_layer != self.first_layer else ""
        return f"layer{'s' * bool(last)} {self.first_layer}{last}, family {self.family}"

    @property
    def length_bytes(self) -> int:
        """Bytes of the section without the padding behind it."""
        return self.num_units * self.stride_bytes

    def part_offset_bytes(self, layer: int) -> int:
        """Where `layer`'s part of the first unit begins; its other parts follow, `stride_bytes` apart."""
        return self.offset_bytes + (layer - self.first_layer) * self.unit_bytes


class PartPlan(Record):
    """How one family of one layer is used: its density, pinned units, and cache slots beside the pinned ones."""

    layer: Count
    family: FamilyName
    density: Share
    num_pinned: Count
    """The first so many of the rank that the tables give."""
    cache_slots: Count


ITEM_BYTES = {"uint8": 1, "int32": 4, "int64": 8, "uint32": 4, "float16": 2, "float32": 4}


class SelectorArray(Record):
    """An array that a plan's selector keeps for one family of one layer, in tables.safetensors."""

    layer: Count
    family: FamilyName
    name: str = Field(pattern=PLUGIN_NAME)
    dtype: Literal["uint8", "int32", "int64", "uint32", "float16", "float32"]
    shape: Many[PositiveCount] = Field(min_length=1, max_length=4)

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Plan(Record):
    """One way to run the artifact under one DRAM budget."""

    name: str
    method: Method
    options: Options = Field(default={})
    """The selector's own settings; those left out have the defaults that its file gives."""
    arrays: Many[SelectorArray] = ()
    """What the selector was fitted to."""
    cache: CacheName
    cache_options: Options = Field(default={})
    """The policy's own settings; those left out have the defaults that its file gives."""
    dram_budget_bytes: PositiveCount
    context_length: PositiveCount
    resident_bytes: Count
    predictor_bytes: Count
    kv_cache: KvCacheFormat = "fp16"
    """How keys and values are kept: `int8` in groups of 32 values of a head, as int8_group32."""
    kv_cache_bytes: Count
    read_buffer_bytes: PositiveCount
    """Page-rounded buffer that device reads land in, and that units are used from which are not cached; also bounds the
    prefill's blocks."""
    preload_buffer_bytes: Count = 0
    """Where reads land that are made before their units are asked for, whole pages (ActiveFlow 3); 0 for none."""
    preload_guess: Share = 1.0
    """Share of the units that a later layer is expected to choose that is read ahead: those which are surest."""
    collapse_gap_bytes: Count
    """Two reads closer than this become one (Ripple 5.1)."""
    collapse: Collapse = "static"
    """Whether that gap holds throughout, or is where a run begins that finds its own (runtime/store/gap.py)."""
    queue_depth: PositiveCount
    parts: Many[PartPlan]
    """One per layer and family: by layer, then in the order of the manifest's families."""

    @property
    def title(self) -> str:
        """`plan 'name'`, for sentences; a name is its writer's, of any length."""
        return f"plan '{clipped(self.name)}'"


class Layout(Record):
    """The arithmetic of an artifact."""

    page_bytes: PositiveCount
    sections: Many[Section]
    flash_bytes: PositiveCount
    plans: Many[Plan] = Field(min_length=1)
    byte_order: Literal["little"] = "little"

    @property
    def largest_plan(self) -> Plan:
        """What runs where no budget is given."""
        return by_budget(self.plans)[-1]


def layer_groups(num_hidden_layers: int, layers_per_group: int) -> tuple[range, ...]:
    """The layer numbers of each group of consecutive layers, in order; the last group may be smaller."""
    firsts = range(0, num_hidden_layers, layers_per_group)
    return tuple(range(first, min(first + layers_per_group, num_hidden_layers)) for first in firsts)


def by_budget(plans: Iterable[Plan]) -> list[Plan]:
    """By ascending DRAM budget, equal ones by name."""
    return sorted(plans, key=lambda plan: (plan.dram_budget_bytes, plan.name))


def placed_parts(plan: Plan, sections: Iterable[Section]) -> list[tuple[PartPlan, Section]]:
    """The parts of a plan, each with the section that holds its units."""
    found = {(layer, section.family): section for section in sections for layer in section.layers}
    return [(part, found[part.layer, part.family]) for part in plan.parts]
