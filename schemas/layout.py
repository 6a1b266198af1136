"""The result of `layout`: every offset of flash.img (computed nowhere else); and the plans that the runtime follows."""

import math
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from coldpress.schemas.base import Count, Extended, Many, Options, PositiveCount, Record, Share
from coldpress.schemas.errors import clipped
from coldpress.schemas.families import PLUGIN_NAME, FamilyName, FormatName, Method, UnitFormat

SECTION_ALIGN_BYTES = 65536
CacheName = Annotated[str, Field(pattern=PLUGIN_NAME)]
DraftName = Annotated[str, Field(pattern=PLUGIN_NAME)]
RoutingName = Annotated[str, Field(pattern=PLUGIN_NAME)]
"""Names of files of runtime/cache, runtime/drafts and runtime/routing; one that a runtime does not have is not an error
(FORMAT.md, section 7)."""

Collapse = Literal["static", "adaptive"]
Preload = Literal["on", "off"]
KvCacheFormat = Literal["fp16", "int8"]


class Section(Extended):
    """One family of consecutive layers on flash: `num_units` units, `stride_bytes` apart, starting at `offset_bytes`.

    A unit holds one part of `unit_bytes` per layer, one after another, so that a section is `[unit][layer][slice]`
    (ActiveFlow 3, Fig. 9). With one layer the stride equals `unit_bytes`.
    """

    LATER = ("format",)

    first_layer: Count
    last_layer: Count
    family: FamilyName
    offset_bytes: Count
    num_units: PositiveCount
    unit_bytes: PositiveCount
    """Bytes of one layer's part of a unit."""
    stride_bytes: PositiveCount
    """Bytes from one unit to the next: the parts of all layers."""
    format: UnitFormat | None = None
    """Format of the layers' units, or that of each slice; None, which is left out of the file: that of the family."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer + 1)

    @property
    def name(self) -> str:
        last = f" to {self.last_layer}" if self.last_layer != self.first_layer else ""
        return f"layer{'s' * bool(last)} {self.first_layer}{last}, family {self.family}"

    @property
    def length_bytes(self) -> int:
        """Returns the bytes of the section, without the padding behind it."""
        return self.num_units * self.stride_bytes

    def part_offset_bytes(self, layer: int) -> int:
        """Returns where `layer`'s part of the first unit begins; its other parts follow `stride_bytes` apart."""
        return self.offset_bytes + (layer - self.first_layer) * self.unit_bytes


class RowTable(Record):
    """A matrix behind all sections; a token needs single rows of it. Row i begins at `offset_bytes + i row_bytes`."""

    role: str
    offset_bytes: Count
    num_rows: PositiveCount
    row_bytes: PositiveCount
    format: FormatName

    @property
    def name(self) -> str:
        return self.role

    @property
    def length_bytes(self) -> int:
        """Returns the bytes of all rows, without the padding behind them."""
        return self.num_rows * self.row_bytes


class PartPlan(Record):
    """Settings of a run for one family of one layer; `cache_slots` are without those of pinned units."""

    layer: Count
    family: FamilyName
    density: Share
    num_pinned: Count
    """Number of pinned units: the first ones of the rank in the tables."""
    cache_slots: Count


ITEM_BYTES = {"uint8": 1, "int32": 4, "int64": 8, "uint32": 4, "float16": 2, "float32": 4}


class SelectorArray(Record):
    """An array that a plan's selector stores for one family of one layer, in tables.safetensors."""

    layer: Count
    family: FamilyName
    name: str = Field(pattern=PLUGIN_NAME)
    dtype: Literal["uint8", "int32", "int64", "uint32", "float16", "float32"]
    shape: Many[PositiveCount] = Field(min_length=1, max_length=4)

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Plan(Extended):
    """One way to run the artifact under one DRAM budget."""

    LATER = ("draft", "draft_tokens", "draft_bytes", "draft_certainty", "routing", "routing_strengths")

    name: str
    method: Method
    options: Options = Field(default={})
    """The selector's settings; absent ones have the defaults of the selector's file."""
    arrays: Many[SelectorArray] = ()
    """The results of fitting the selector."""
    cache: CacheName
    cache_options: Options = Field(default={})
    """The cache policy's settings; absent ones have the defaults of the policy's file."""
    dram_budget_bytes: PositiveCount
    context_length: PositiveCount
    resident_bytes: Count
    predictor_bytes: Count
    kv_cache: KvCacheFormat = "fp16"
    """The format of keys and values; `int8` stores groups of 32 values of a head, as int8_group32."""
    kv_cache_bytes: Count
    read_buffer_bytes: PositiveCount
    """Buffer of whole pages for reads; uncached units are used from it. It also bounds the blocks of the prefill."""
    preload_buffer_bytes: Count = 0
    """Buffer of whole pages for preloads (ActiveFlow 3); 0 if nothing is preloaded."""
    preload_guess: Share = 1.0
    """Fraction of the guessed units of a later layer that is preloaded, most certain first."""
    collapse_gap_bytes: Count
    """Two reads closer than this become one (Ripple 5.1)."""
    collapse: Collapse = "static"
    """`static`: the gap is constant; else the start of one that adapts during a run (runtime/store/gap.py)."""
    queue_depth: PositiveCount
    draft: DraftName | None = None
    """Proposer of the next tokens of a single sequence, which the model then checks in one pass (LLM in a flash 5.2);
    None, which is left out of the file, for nothing."""
    draft_tokens: Count = 0
    """Most tokens that it proposes per pass; 0, which is left out, without a draft."""
    draft_bytes: Count = 0
    """DRAM of the draft model, which lies in the artifact's folder `draft`; 0, which is left out, without one."""
    draft_certainty: Share = 1.0
    """The draft model proposes one more token while the product of its drafts' probabilities is at least this; 1, which
    is left out, without one."""
    routing: RoutingName | None = None
    """Way in which a mixture's routers choose experts; None, which is left out of the file: as it was trained."""
    routing_strengths: Many[float] = ()
    """Each router's preference for experts in DRAM (runtime/routing); empty, which is left out, without `routing`."""
    parts: Many[PartPlan]
    """One per layer and family: by layer, then in the order of the manifest's families."""

    @property
    def title(self) -> str:
        """Returns `plan 'name'` for sentences; the name is clipped, since a stranger's may have any length."""
        return f"plan '{clipped(self.name)}'"


class Layout(Extended):
    LATER = ("tables",)

    page_bytes: PositiveCount
    sections: Many[Section]
    tables: Many[RowTable] = ()
    """Behind the sections; empty, which is left out of the file, where a token's rows stay in DRAM."""
    flash_bytes: PositiveCount
    byte_order: Literal["little"] = "little"


def layer_groups(num_hidden_layers: int, layers_per_group: int) -> tuple[range, ...]:
    """Returns the layer numbers of each group of consecutive layers, in order; the last group may be smaller."""
    firsts = range(0, num_hidden_layers, layers_per_group)
    return tuple(range(first, min(first + layers_per_group, num_hidden_layers)) for first in firsts)


def by_budget(plans: Iterable[Plan]) -> list[Plan]:
    return sorted(plans, key=lambda plan: (plan.dram_budget_bytes, plan.name))


def placed_parts(plan: Plan, sections: Iterable[Section]) -> list[tuple[PartPlan, Section]]:
    found = {(layer, section.family): section for section in sections for layer in section.layers}
    return [(part, found[part.layer, part.family]) for part in plan.parts]
