"""Derives the contents of an artifact's tensor files from its manifest: names, types, shapes, bytes.

The reader checks the files against them, FORMAT.md lists them, and the memory budget counts their bytes.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from coldpress.runtime import plugins
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName, Slice, UnitFormat, resident_names, resident_roles, slice_formats
from coldpress.schemas.layout import SelectorArray
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.model import MLP_ROLES, ModelSpec, block_norms, matrices, norm_parts, qk_norms, role_shape
from coldpress.schemas.predictors import matrix_shapes

Layout = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Tensor name -> dtype and shape as stored."""
Shapes = dict[str, tuple[int, ...]]
"""Role -> shape of its values."""


def nbytes(name: FormatName, length: int) -> int:
    return plugins.load("coldpress.runtime.quantization", Format, name).nbytes(length)


def unit_nbytes(name: UnitFormat, shapes: Sequence[tuple[int, int]]) -> int:
    """Bytes of a unit whose matrices have these numbers of slices, and of values in each."""
    each = zip(slice_formats(name, len(shapes)), shapes, strict=True)
    return sum(count * nbytes(own, length) for own, (count, length) in each)


def in_units(codes: np.ndarray, piece: Slice, num_units: int) -> np.ndarray:
    """Returns what each unit has of a matrix whose slices are encoded, uint8 [num_units, n], from these slices' codes,
    uint8 [slices, slice_bytes]: one for each unit; or, for blocks of neurons, the matrix's rows."""
    if piece.axis != "columns":
        return codes.reshape(num_units, -1)
    return codes.reshape(len(codes), num_units, -1).transpose(1, 0, 2).reshape(num_units, -1)


def out_of_units(units: np.ndarray, piece: Slice, num_rows: int) -> np.ndarray:
    """Returns the inverse of `in_units`, for a matrix of `num_rows` rows."""
    if piece.axis == "rows":
        return units.reshape(num_rows, -1)
    if piece.axis == "columns":
        return units.reshape(len(units), num_rows, -1).transpose(1, 0, 2).reshape(num_rows, -1)
    return units


def layout_bytes(layout: Layout) -> int:
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())


def table_tensors(manifest: Manifest, plans: Collection[str] | None = None) -> Layout:
    """Returns the layout of tables.safetensors, with the selector arrays of the plans named in `plans` (None: all).
    Besides selector arrays: page checksums, an order per section, a rank per layer and family."""
    pages = manifest.flash.size_bytes // manifest.flash.page_bytes
    tables: Layout = {"page_crc32c": (np.dtype("<u4"), (pages,))}
    for section in manifest.flash.sections:
        tables[f"order.{section.first_layer}.{section.family}"] = (np.dtype("<i4"), (section.num_units,))
        for layer in section.layers:
            tables[f"rank.{layer}.{section.family}"] = (np.dtype("<i4"), (section.num_units,))
    for index, plan in enumerate(manifest.plans):
        for array in plan.arrays if plans is None or plan.name in plans else ():
            tables[selector_tensor(index, array)] = (np.dtype(array.dtype).newbyteorder("<"), array.shape)
    return tables


def selector_tensor(plan_index: int, array: SelectorArray) -> str:
    return f"selector.{plan_index}.{array.layer}.{array.family}.{array.name}"


def predictor_tensors(manifest: Manifest) -> Layout:
    """Returns the layout of predictors.safetensors: two uint8 [rows, row_bytes] per layer that has a predictor."""
    return {
        f"{entry.layer}.{name}": (np.dtype("u1"), (rows, nbytes(entry.format, columns)))
        for entry in manifest.predictors
        for name, (rows, columns) in matrix_shapes(manifest.model, entry.rank).items()
    }


def resident_tensors(manifest: Manifest) -> Layout:
    """Returns the layout of resident.safetensors: float32 as is, quantized tensors as uint8 [rows, row_bytes]."""
    layout: Layout = {}
    for tensor in manifest.resident:
        if tensor.format is None:
            layout[tensor.role] = (np.dtype("<f4"), tensor.shape)
        else:
            row_bytes = nbytes(tensor.format, tensor.shape[-1])
            layout[tensor.role] = (np.dtype("u1"), (math.prod(tensor.shape[:-1]), row_bytes))
    return layout


def model_tensors(manifest: Manifest) -> tuple[Shapes, Shapes]:
    """Returns the shapes of the resident tensors that the model must have, and of those that it may have."""
    spec = manifest.model
    roles = ["embed_tokens.weight", *([] if spec.tie_word_embeddings else ["lm_head.weight"])]
    roles += spec.frequencies.values() if spec.position == "rotary" else ["embed_positions.weight"]
    required = {role: role_shape(spec, role) for role in roles}
    _add_norm(required, "norm", spec)
    optional = {"lm_head.bias": role_shape(spec, "lm_head.bias")}
    families = [entry.family for entry in manifest.families]
    for layer in range(spec.num_hidden_layers):
        prefix = f"layers.{layer}."
        for norm in block_norms(spec):
            _add_norm(required, f"{prefix}{norm}", spec)
        for name in resident_names(layer, families, spec):
            required[f"{prefix}{name}.weight"] = role_shape(spec, f"{prefix}{name}.weight")
        if spec.attention_sinks:
            required[f"{prefix}attention.sinks"] = role_shape(spec, f"{prefix}attention.sinks")
        has_experts = spec.of_layer(layer).is_mixture
        of_experts = [f"{prefix}{name}.bias" for role in MLP_ROLES * has_experts for name in matrices(role, spec)]
        optional |= {role: role_shape(spec, role) for role in of_experts}
        biased = spec.attention_roles if spec.is_mixture else resident_roles((), spec)
        optional |= {f"{prefix}{role}.bias": role_shape(spec, f"{role}.bias") for role in biased}
        latents = ["k_norm", *["q_norm"] * (spec.q_lora_rank > 0)] if spec.is_latent else []
        required |= {f"{prefix}{norm}.weight": role_shape(spec, f"{norm}.weight") for norm in latents}
        for norm in [norm for norms in qk_norms(spec).values() for norm in norms if not spec.is_latent]:
            optional |= {f"{prefix}{norm}.{part}": role_shape(spec, f"{norm}.{part}") for part in norm_parts(spec)}
        routing = ("router.bias", "router.correction") if has_experts else ()
        routing += ("shared_expert_gate.weight",) if has_experts and spec.shared_intermediate_size else ()
        optional |= {f"{prefix}{role}": role_shape(spec, role) for role in routing}
    return required, optional


def _add_norm(shapes: Shapes, name: str, spec: ModelSpec) -> None:
    for part in norm_parts(spec):
        shapes[f"{name}.{part}"] = (spec.hidden_size,)
