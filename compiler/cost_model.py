"""Computes what a model costs in bytes, and the sparsity that a budget asks for: for allocate, layout and report.

Reads shapes only, never weights. Sizes follow the storage rule of `stored_format`, so that a byte counted here is a
byte in the artifact. Seconds are not estimated here (compiler/seconds.py).
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Protocol

import numpy as np
from pydantic import AfterValidator

from coldpress.runtime.artifact.contents import nbytes, unit_nbytes
from coldpress.runtime.dram.kv_cache import kv_cache_bytes
from coldpress.runtime.quantities import parse_bytes
from coldpress.runtime.quantization._mixed import coarsest, format_at
from coldpress.schemas.device import Flash
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import (
    FamilyName,
    FormatName,
    Formats,
    UnitFormat,
    dense_family,
    head_of,
    kept_of,
    num_units,
    slice_shape,
    slices,
    unit_keys,
    unit_role,
)
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.manifest import MAX_PLANS
from coldpress.schemas.model import ModelSpec, role_shape, rows_on_flash
from coldpress.schemas.predictors import matrix_shapes
from coldpress.schemas.quantized import ResidentTensor

PEAK_READ_BYTES = 4 << 20
"""Largest read buffer: the storage of every profile reaches its peak bandwidth with reads of this size or less."""
LEAST_BUDGET_BYTES = 1000
"""Fewer are a mistake: a number without its unit."""
HEAD_FORMAT: FormatName = "int8_group32"
"""Format of token embeddings and head beside layers in fewer than 16 bits, unless a loss was measured."""
READ_BUFFER_SHARE = 0.125
"""Share of the DRAM left for flash units."""


class HasShape(Protocol):
    """A tensor of a checkpoint, loaded or only described."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class HasShapes(Protocol):
    """A `Model`, or the shapes that config.json implies (compiler/checkpoint/shapes.py)."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tensors(self) -> Mapping[str, HasShape]: ...

    @property
    def num_parameters(self) -> int: ...


# Text -> bytes


def parse_share(value: int | str) -> float | None:
    """Parses a percentage: 0.5 for `50%`; None where `value` is not a percentage. Raises ColdpressError if it is not
    above 0 and at most 100."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", str(value))
    if match is None:
        return None
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise ColdpressError(f"'{value}' of the model is not a DRAM budget; give more than 0% and at most 100%")
    return share


def budget_bytes(budget: int | str, dense_bytes: int, bookkeeping: int) -> int:
    """Returns a DRAM budget in bytes; a percentage is a share of `dense_bytes` (see `dense_footprint_bytes`), and
    `bookkeeping` comes on top of it."""
    share = parse_share(budget)
    return parse_bytes(budget) if share is None else max(1, math.floor(share * dense_bytes)) + bookkeeping


def budgets_in(asked: int | str) -> tuple[int | str, ...]:
    """Returns the DRAM budgets that a setting lists, each in bytes or as a share, in the user's order; raises
    ColdpressError if one of them is no amount, or there are more than an artifact has plans."""
    each = [asked] if isinstance(asked, int) else asked.split(",")
    # a share of the dense footprint stays text, because only `allocate` knows the footprint
    found = tuple(parse_bytes(one) if parse_share(one) is None else str(one).strip() for one in each)
    if len(found) > MAX_PLANS:
        raise ColdpressError(f"dram_budget names {len(found)} budgets, expected at most {MAX_PLANS}; give fewer")
    return found


def _checked_budget(value: int | str) -> int | str:
    found = budgets_in(value)
    for size in found:
        if isinstance(size, int) and size < LEAST_BUDGET_BYTES:
            raise ColdpressError(f"dram_budget={size} is {size} bytes; did you mean {size}GB?")
    return found[0] if len(found) == 1 else ",".join(map(str, found))


DramBudget = Annotated[int | str, AfterValidator(_checked_budget)]
"""Type of a setting, one budget or several with commas between them: text that is none is refused with its own
message."""


# Bytes of tensors


@functools.lru_cache(maxsize=1 << 16)  # a search counts the same tensors for every candidate
def stored_format(role: str, formats: Formats) -> FormatName | None:
    """Returns how an artifact of `formats` stores a tensor; None means float32.

    Matrices of attention and MLP take the artifact's format along their input dimension, of several the coarsest; token
    embeddings and head keep at least 8 bits, unless the head has a format of its own; both only where they do not keep
    a quantized file's codes; norms, biases, routers, learned positions and rotary frequencies stay float32.
    """
    head = head_of(formats)
    if head is not None and role == head.role:
        return head.format
    if (kept := next((one.format for one in kept_of(formats) if role in one.roles), None)) is not None:
        return kept
    name = role.rpartition("layers.")[2]
    format_name = coarsest(formats)
    if role in ("embed_tokens.weight", "lm_head.weight"):
        return "fp16" if format_name == "fp16" else HEAD_FORMAT
    matrix = r"\d+\.(experts\.\d+\.|shared_expert\.)?(q|k|v|o|q_b|kv_b|gate|up|down)_proj\.weight"
    return format_name if re.fullmatch(matrix, name) else None


def stored_formats(format_name: FormatName) -> tuple[FormatName, ...]:
    roles = ("layers.0.q_proj.weight", "lm_head.weight")
    found = {stored for role in roles if (stored := stored_format(role, format_name)) is not None}
    return tuple(sorted(found))


def tensor_bytes(role: str, shape: tuple[int, ...], formats: Formats) -> int:
    stored = stored_format(role, formats)
    if stored is None:
        return 4 * math.prod(shape)
    return math.prod(shape[:-1]) * slice_bytes(shape[-1], stored)


def slice_bytes(length: int, format_name: FormatName) -> int:
    return nbytes(format_name, length)


def unit_bytes(family: FamilyName, spec: ModelSpec, name: UnitFormat) -> int:
    return unit_nbytes(name, [slice_shape(piece, spec) for piece in slices(family, spec)])


def all_read_units(
    flash: Flash, spec: ModelSpec, families: Iterable[FamilyName], formats: Formats, layers_per_group: int
) -> dict[tuple[int, FamilyName], np.ndarray]:
    layers, families = range(spec.num_hidden_layers), tuple(families)
    sizes = {
        (at, family): unit_bytes(family, spec, format_at(formats, at, family)) for at in layers for family in families
    }
    known = {size: read_units(flash, size, layers_per_group) for size in set(sizes.values())}
    return {key: known[size] for key, size in sizes.items()}


def read_units(flash: Flash, unit_bytes: int, layers_per_group: int) -> np.ndarray:
    """Returns the cost of reading besides units, in multiples of the time of one unit's bytes: float64 [4].

    First a read's own time, which is the device's break-even gap (schemas/device.py). Then the time of bytes outside
    units: for units at any offset, rounding to pages adds on average a page less the greatest common divisor of page
    and stride. In a layer group a unit counts with the other layers' parts behind it, which a read spares after its
    last unit. Then the time to a request's first byte, the device's latency. Last comes the law's overlap, which has no
    unit.
    """
    least_bytes = flash.latency_s.value * flash.bytes_per_s
    costs = flash.break_even_gap_bytes, flash.page_bytes.value, least_bytes
    return read_units_of(*costs, flash.law.overlap, unit_bytes, layers_per_group)


def read_units_of(
    gap_bytes: float, page_bytes: int, least_bytes: float, overlap: float, unit_bytes: int, layers_per_group: int = 1
) -> np.ndarray:
    """Does as `read_units`, from break-even gap, page, bytes during the first byte's latency, and overlap."""
    stride_bytes = layers_per_group * unit_bytes
    edge_bytes = page_bytes - math.gcd(stride_bytes, page_bytes) - (stride_bytes - unit_bytes)
    return np.array([*(np.array([gap_bytes, edge_bytes, least_bytes]) / stride_bytes), overlap])


def flash_bytes(families: tuple[FamilyName, ...], spec: ModelSpec, formats: Formats) -> int:
    """Returns the bytes of all units of `families` in all layers, without the padding between sections."""
    in_layers = Counter((family, format_at(formats, layer, family)) for layer, family in unit_keys(families, spec))
    return sum(
        count * num_units(family, spec) * unit_bytes(family, spec, name) for (family, name), count in in_layers.items()
    )


def resident_tensors(
    model: HasShapes, families: tuple[FamilyName, ...], formats: Formats
) -> tuple[ResidentTensor, ...]:
    by_row = rows_on_flash(model.spec)
    return tuple(tensor for tensor in whole_tensors(model, families, formats) if tensor.role not in by_row)


def whole_tensors(model: HasShapes, families: tuple[FamilyName, ...], formats: Formats) -> Iterator[ResidentTensor]:
    """Yields the tensors that no family holds, by role; rotary frequencies, which checkpoints do not hold, are added,
    and a tied head is its embedding."""
    spec = model.spec
    on_flash = {piece.role for family in families for piece in slices(family, spec)}
    stored = {
        role: source.shape
        for role, source in model.tensors.items()
        if role.endswith(".bias") or unit_role(role, spec) not in on_flash
    }
    if spec.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    stored = dict(sorted((stored | {role: role_shape(spec, role) for role in spec.frequencies.values()}).items()))
    for role, shape in stored.items():
        yield ResidentTensor(role=role, format=stored_format(role, formats), shape=shape)


def resident_bytes(model: HasShapes, families: tuple[FamilyName, ...], formats: Formats) -> int:
    found = resident_tensors(model, families, formats)
    return sum(tensor_bytes(tensor.role, tensor.shape, formats) for tensor in found)


def weight_bytes(model: HasShapes, formats: Formats) -> int:
    """Returns the bytes of all weights in their formats: S_m, the size of the LLM (ActiveFlow Table 1)."""
    whole = (dense_family(model.spec),)
    units = flash_bytes(whole, model.spec, formats)
    return resident_bytes(model, whole, formats) + units + row_table_bytes(model.spec, formats)


def row_table_bytes(spec: ModelSpec, formats: Formats) -> int:
    return sum(tensor_bytes(role, role_shape(spec, role), formats) for role in rows_on_flash(spec))


def dense_footprint_bytes(
    model: HasShapes, formats: Formats, context_length: int, kv_cache: KvCacheFormat = "fp16"
) -> int:
    """Returns the bytes of all weights and the KV cache in a dense run. A budget in percent is a share of this."""
    return weight_bytes(model, formats) + kv_cache_bytes(model.spec, context_length, kv_cache)


def predictor_bytes(spec: ModelSpec, rank: int, format_name: FormatName) -> int:
    return sum(rows * slice_bytes(columns, format_name) for rows, columns in matrix_shapes(spec, rank).values())


def whole_rank(rank: int, format_name: FormatName) -> int:
    """Rounds a rank up until fc2's rows fill their last group: any smaller rank in it takes as many bytes."""
    while slice_bytes(rank + 1, format_name) == slice_bytes(rank, format_name):
        rank += 1
    return rank


# Read buffer


def read_buffer_bytes(
    spec: ModelSpec, formats: Formats, families: Sequence[FamilyName], free_bytes: int, page_bytes: int
) -> int:
    """Returns the size of the read buffer, in whole pages, given the DRAM that resident tensors, predictors, KV cache
    and bookkeeping leave (`free_bytes`, which may be negative). It holds at least the largest unit with the pages it
    touches, even if that exceeds `free_bytes` (the caller checks), and at most PEAK_READ_BYTES."""
    kinds = {(family, format_at(formats, layer, family)) for layer, family in unit_keys(families, spec)}
    largest = max(unit_bytes(family, spec, name) for family, name in kinds)
    least = -(-largest // page_bytes) * page_bytes + page_bytes
    return max(least, min(PEAK_READ_BYTES, int(free_bytes * READ_BUFFER_SHARE) // page_bytes * page_bytes))


# Sparsity


def llm_sparsity(m_max: int, s_m: int) -> float:
    """Returns sp = 1 - M_max / S_m: the least sparsity with which the active weights fit the budget (ActiveFlow 4.1).
    The paper prunes the whole model by it. `allocate` prunes only the MLP, so the whole model's sparsity is less: two
    thirds of sp where the MLP has two thirds of the weights."""
    return min(1.0, max(0.0, 1 - m_max / s_m))
