"""Computes where units lie in flash.img, and the DRAM that a run keeps beside weights, caches and buffers.

The only place where offsets are made, from shapes alone, so that stages before `layout` count with its results.
Sections follow each other by layer group, then family, each at a multiple of 64 KiB, dense inside: padding a 7 kB
bundle to a page would undo its ordering (LLM-in-a-flash 3.2, Ripple 4). A unit of a group holds all its layers' parts
(ActiveFlow 3, Fig. 9).
"""

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from coldpress.compiler.cost_model import (
    HasShapes,
    budget_bytes,
    budgets_in,
    dense_footprint_bytes,
    stored_format,
    tensor_bytes,
    unit_bytes,
)
from coldpress.compiler.shared_settings import DEFAULT_CACHE
from coldpress.runtime.dram.bookkeeping import counted_bytes
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization._mixed import coarsest, format_at
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FamilyName, FormatName, Formats, dense_family, layer_format, num_units, unit_keys
from coldpress.schemas.layout import SECTION_ALIGN_BYTES, KvCacheFormat, RowTable, Section, SelectorArray, layer_groups
from coldpress.schemas.model import ModelSpec, role_shape, rows_on_flash


def make_sections(
    spec: ModelSpec, families: Sequence[FamilyName], formats: Formats, layers_per_group: int = 1
) -> tuple[Section, ...]:
    """Returns one section per layer group and family, in that order, each at the next multiple of 64 KiB. Raises
    ColdpressError if the layers of a group have several formats, or groups would have layers without units."""
    if layers_per_group > 1 and spec.dense_layers:
        raise ColdpressError(
            f"layers_per_group={layers_per_group} was asked for, and layers {', '.join(map(str, spec.dense_layers))} "
            "have no experts, so that their MLP has no units to lie beside others; use layers_per_group=1"
        )
    having = set(unit_keys(families, spec))
    found: list[Section] = []
    offset_bytes, base = 0, coarsest(formats)
    for layers in layer_groups(spec.num_hidden_layers, layers_per_group):
        names = {layer_format(formats, layer) for layer in layers}
        if len(names) > 1:
            raise ColdpressError(
                f"layers {layers[0]} to {layers[-1]} are one group and have the formats {' and '.join(sorted(names))}, "
                "expected one, since the units of a group have one size; use layers_per_group=1"
            )
        for family in (family for family in families if (layers[0], family) in having):
            name = format_at(formats, layers[0], family)
            part_bytes = unit_bytes(family, spec, name)
            section = Section(
                first_layer=layers[0],
                last_layer=layers[-1],
                family=family,
                offset_bytes=offset_bytes,
                num_units=num_units(family, spec),
                unit_bytes=part_bytes,
                stride_bytes=len(layers) * part_bytes,
                format=None if name == base else name,
            )
            found.append(section)
            offset_bytes = _round_up(offset_bytes + section.length_bytes)
    return tuple(found)


def row_tables(spec: ModelSpec, sections: Sequence[Section], formats: Formats) -> tuple[RowTable, ...]:
    """Returns the matrices that are read by row, behind the sections, each at the next multiple of 64 KiB."""
    found: list[RowTable] = []
    end = sections[-1].offset_bytes + sections[-1].length_bytes
    for role in rows_on_flash(spec):
        num_rows, length = role_shape(spec, role)
        shape = {"role": role, "num_rows": num_rows, "format": stored_format(role, formats)}
        place = {"offset_bytes": _round_up(end), "row_bytes": tensor_bytes(role, (1, length), formats)}
        found.append(RowTable.model_validate(shape | place))
        end = found[-1].offset_bytes + found[-1].length_bytes
    return tuple(found)


def image_bytes(sections: Sequence[Section], tables: Sequence[RowTable]) -> int:
    last = (*sections, *tables)[-1]
    return _round_up(last.offset_bytes + last.length_bytes)


def bookkeeping_bytes(
    spec: ModelSpec,
    sections: Sequence[Section],
    format_name: FormatName,
    method: str,
    caches: Collection[str],
    page_bytes: int,
    num_plans: int = 1,
) -> int:
    """Returns the bytes that a run of a selector keeps beside weights, KV cache, buffers and units
    (runtime/dram/bookkeeping.py, before there is an artifact), with any of the cache policies that a plan may get; the
    tables have the selector's arrays of all plans."""
    return _counted_bytes(spec, sections, format_name, num_plans * kept_arrays(sections, method), caches, page_bytes)


def dense_bookkeeping_bytes(
    spec: ModelSpec,
    formats: Formats,
    page_bytes: int,
    caches: Collection[str] = (DEFAULT_CACHE,),
    family: FamilyName | None = None,
) -> int:
    """Returns the bookkeeping of a dense run, whose selector keeps no array, with any of `caches`."""
    sections = make_sections(spec, (family or dense_family(spec),), formats)
    return _counted_bytes(spec, sections, formats, (), caches, page_bytes)


def _counted_bytes(
    spec: ModelSpec,
    sections: Sequence[Section],
    formats: Formats,
    arrays: Sequence[SelectorArray],
    caches: Collection[str],
    page_bytes: int,
) -> int:
    tables = row_tables(spec, sections, formats)
    return counted_bytes(spec, sections, tables, image_bytes(sections, tables), page_bytes, arrays, set(caches))


class Whole(NamedTuple):
    """The whole model in DRAM, which a budget in percent refers to: weights and KV cache in their formats, and on top
    the bookkeeping of a dense run with any of `caches`."""

    model: HasShapes
    format: Formats
    context_length: int
    kv_cache: KvCacheFormat
    page_bytes: int
    caches: Collection[str] = (DEFAULT_CACHE,)

    def budgets(self, asked: int | str) -> dict[int, int | str]:
        """Returns the asked DRAM budgets by their bytes, the largest first; a percentage stays text, since it has other
        bytes in other formats. Raises ColdpressError if two of them are equal."""
        each = [(budget_bytes(one, *self._sizes), one) for one in budgets_in(asked)]
        found = sorted(each, key=lambda pair: pair[0], reverse=True)
        for (one, _), (following, _) in pairwise(found):
            if one == following:
                raise ColdpressError(f"dram_budget={asked} names {one:,} bytes twice; give each budget once")
        return dict(found)

    def budget_for(self, least_bytes: int) -> str:
        """Returns the value of dram_budget that gives `least_bytes`: bytes, and a percentage if one does."""
        held, bookkeeping = self._sizes
        percent = math.ceil(100 * (least_bytes - bookkeeping) / held)
        return f"{least_bytes:,}" + (f" ({percent}%)" if 0 < percent <= 100 else "")

    @property
    def _sizes(self) -> tuple[int, int]:
        """The bytes of weights and KV cache, and those of bookkeeping."""
        held = dense_footprint_bytes(self.model, self.format, self.context_length, self.kv_cache)
        return held, dense_bookkeeping_bytes(self.model.spec, self.format, self.page_bytes, self.caches)


def kept_arrays(sections: Sequence[Section], method: str) -> list[SelectorArray]:
    kept = load("coldpress.runtime.sparsity", Selector, method).KEPT
    return [
        SelectorArray.model_validate(
            {"layer": layer, "family": section.family, "name": name}
            | {"dtype": array.dtype, "shape": array.shape(section.num_units)}
        )
        for section in sections
        for layer in section.layers
        for name, array in kept.items()
    ]


def _round_up(value: int) -> int:
    return -(-value // SECTION_ALIGN_BYTES) * SECTION_ALIGN_BYTES
