"""What `layout` computes: every offset of flash.img (made nowhere else), and the plan the runtime follows."""

from typing import Literal

from pydantic import Field

from schemas.base import Count, Options, PositiveCount, Record, Share
from schemas.families import PLUGIN_NAME, FamilyName, Method

SECTION_ALIGN_BYTES = 65536
CacheName = str


class Section(Record):
    """One family of one layer on flash: `num_units` units of `unit_bytes`, densely packed from `offset_bytes`."""

    layer: Count
    family: FamilyName
    offset_bytes: Count
    num_units: PositiveCount
    unit_bytes: PositiveCount

    @property
    def length_bytes(self) -> int:
        """Bytes of the section without the padding behind it."""
        return self.num_units * self.unit_bytes


class SectionPlan(Record):
    """How one section is used: its density, pinned units, and cache slots beside the pinned ones."""

    layer: Count
    family: FamilyName
    density: Share
    num_pinned: Count
    cache_slots: Count


class SelectorArray(Record):
    """An array that a plan's selector keeps for one family of one layer, in tables.safetensors."""

    layer: Count
    family: FamilyName
    name: str = Field(pattern=PLUGIN_NAME)
    dtype: Literal["uint8", "int32", "int64", "uint32", "float16", "float32"]
    shape: tuple[PositiveCount, ...] = Field(min_length=1, max_length=4)


class Plan(Record):
    """One way to run the artifact under one DRAM budget."""

    name: str
    method: Method
    options: Options = Field(default={})
    """The selector's own settings; those left out have the defaults that its file gives."""
    arrays: tuple[SelectorArray, ...] = ()
    """What the selector was fitted to."""
    cache: CacheName
    dram_budget_bytes: PositiveCount
    context_length: PositiveCount
    resident_bytes: Count
    predictor_bytes: Count
    kv_cache_bytes: Count
    read_buffer_bytes: PositiveCount
    """Page-rounded buffer that device reads land in; also bounds the prefill's blocks."""
    staging_slots: tuple[tuple[FamilyName, PositiveCount], ...]
    """Per family, slots shared by all layers for units that are used but not cached."""
    collapse_gap_bytes: Count
    """Two reads closer than this become one (Ripple 5.1)."""
    queue_depth: PositiveCount
    sections: tuple[SectionPlan, ...]


class Layout(Record):
    """The arithmetic of an artifact."""

    page_bytes: PositiveCount
    sections: tuple[Section, ...]
    flash_bytes: PositiveCount
    plans: tuple[Plan, ...]
    byte_order: Literal["little"] = "little"
