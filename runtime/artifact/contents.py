"""What the tensor files of an artifact hold, as derived from its manifest: names, types, shapes, bytes.

The reader holds the files against it, FORMAT.md lists it, and the memory budget is computed from it.
"""

import math
from typing import Any

import numpy as np

from runtime import _plugins
from schemas.families import FamilyName, resident_roles
from schemas.manifest import Manifest
from schemas.model import MLP_ROLES, ModelSpec

Layout = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Tensor name -> dtype and shape as stored."""
Shapes = dict[str, tuple[int, ...]]
"""Role -> shape of its values."""


def nbytes(format_name: str, length: int) -> int:
    """Bytes of `length` values in a format."""
    return _plugins.load("runtime.quantization", format_name).nbytes(length)


def layout_bytes(layout: Layout) -> int:
    """Bytes of the tensors of a layout together."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())


def table_tensors(manifest: Manifest) -> Layout:
    """tables.safetensors: page checksums; per section the unit order and the pinned units."""
    pages = manifest.flash.size_bytes // manifest.flash.page_bytes
    tables: Layout = {"page_crc32c": (np.dtype("<u4"), (pages,))}
    for section in manifest.flash.sections:
        tables[f"order.{section.layer}.{section.family}"] = (np.dtype("<i4"), (section.num_units,))
        tables[f"pinned.{section.layer}.{section.family}"] = (np.dtype("u1"), (section.num_units,))
    return tables


def predictor_tensors(manifest: Manifest) -> Layout:
    """predictors.safetensors: two matrices per layer."""
    spec, half = manifest.model, np.dtype("<f2")
    layout: Layout = {}
    for entry in manifest.predictors:
        layout[f"{entry.layer}.fc1"] = (half, (entry.rank, spec.hidden_size))
        layout[f"{entry.layer}.fc2"] = (half, (spec.intermediate_size, entry.rank))
    return layout


def resident_tensors(manifest: Manifest) -> Layout:
    """resident.safetensors: float32 as is, quantized tensors as uint8 [rows, row_bytes]."""
    layout: Layout = {}
    for tensor in manifest.resident:
        if tensor.format is None:
            layout[tensor.role] = (np.dtype("<f4"), tensor.shape)
        else:
            row_bytes = nbytes(tensor.format, tensor.shape[-1])
            layout[tensor.role] = (np.dtype("u1"), (math.prod(tensor.shape[:-1]), row_bytes))
    return layout


def model_tensors(manifest: Manifest) -> tuple[Shapes, Shapes]:
    """The resident tensors that the model must have, and those that it may have."""
    spec = manifest.model
    required, optional = _shared_shapes(spec), Shapes()
    families: tuple[FamilyName, ...] = tuple(entry.family for entry in manifest.families)
    matrices = _matrix_shapes(spec)
    for layer in range(spec.num_hidden_layers):
        prefix = f"layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            _add_norm(required, f"{prefix}{norm}", spec)
        for role in ("q_proj", "k_proj", "v_proj", "o_proj", *resident_roles(families, spec)):
            required[f"{prefix}{role}.weight"] = matrices[role]
        biased = [role for role in matrices if role not in MLP_ROLES or spec.gated_mlp or role != "gate_proj"]
        optional |= {f"{prefix}{role}.bias": matrices[role][:1] for role in biased}
        optional |= {f"{prefix}{norm}.weight": (spec.head_dim,) for norm in ("q_norm", "k_norm")}
    return required, optional


def _shared_shapes(spec: ModelSpec) -> Shapes:
    vocabulary = (spec.vocab_size, spec.hidden_size)
    required: Shapes = {"embed_tokens.weight": vocabulary}
    _add_norm(required, "norm", spec)
    if not spec.tie_word_embeddings:
        required["lm_head.weight"] = vocabulary
    if spec.position == "rotary":
        required["rotary.inv_freq"] = (spec.rotary_dim // 2,)
    else:
        positions = spec.max_position_embeddings + spec.position_offset
        required["embed_positions.weight"] = (positions, spec.hidden_size)
    return required


def _add_norm(shapes: Shapes, name: str, spec: ModelSpec) -> None:
    shapes[f"{name}.weight"] = (spec.hidden_size,)
    if spec.norm == "layer_norm":
        shapes[f"{name}.bias"] = (spec.hidden_size,)


def _matrix_shapes(spec: ModelSpec) -> Shapes:
    queries = spec.num_attention_heads * spec.head_dim
    keys = spec.num_key_value_heads * spec.head_dim
    return {
        "q_proj": (queries, spec.hidden_size),
        "k_proj": (keys, spec.hidden_size),
        "v_proj": (keys, spec.hidden_size),
        "o_proj": (spec.hidden_size, queries),
        "gate_proj": (spec.intermediate_size, spec.hidden_size),
        "up_proj": (spec.intermediate_size, spec.hidden_size),
        "down_proj": (spec.hidden_size, spec.intermediate_size),
    }
