"""Checks that a GGUF file's codes come in as they are: values of what `quantize` stores, beside the package gguf."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from coldpress.compiler.cost_model import slice_bytes
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.kept_codes import keeping, own_layers
from coldpress.compiler.stages import ingest, quantize
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.quantize import QuantizeConfig
from coldpress.runtime.artifact.contents import out_of_units
from coldpress.runtime.kernels.products import decode_rows
from coldpress.runtime.quantization._mixed import format_at, format_fields
from coldpress.schemas.families import dense_family, num_units, slice_formats, slice_shape, slices
from coldpress.schemas.model import Model
from coldpress.schemas.quantized import Quantized
from coldpress.schemas.sparsity import Sparsity
from tests.support.statistics import sparsity_of


def imported(file: Path, folder: Path) -> tuple[int, int]:
    """Returns (matrices that have the file's values exactly in the codes that `quantize` makes, all matrices)."""
    from gguf import GGMLQuantizationType, GGUFReader
    from gguf.quants import dequantize

    model = ingest.run(IngestConfig(model=str(file)), Workspace(folder / "ingest", "benchmark"))
    whole = sparsity_of("dense", {dense_family(model.spec): (1.0,) * model.spec.num_hidden_layers})
    sparsity = whole.model_copy(update=format_fields(keeping(model, own_layers(model) or "fp16")))
    tensors, equal, total = {one.name: one for one in GGUFReader(file).tensors}, 0, 0
    for layer in range(model.spec.num_hidden_layers):
        work = Workspace(folder / "quantize", "benchmark")
        for role, values in decoded(quantize.run(QuantizeConfig(), model, sparsity, (layer,), work), sparsity, model):
            tensor = tensors[model.tensors[role].tensor]
            expected = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
            equal += np.array_equal(values, _in_halves(expected, model.tensors[role].paired_heads))
            total += 1
        shutil.rmtree(work.folder)
    return equal, total


def decoded(made: Quantized, sparsity: Sparsity, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (role, values float32) of all matrices in a layer's codes, and of those that all layers share."""
    (layer,), spec = made.layers, model.spec
    arrays, prefix = load_arrays(layer.arrays), f"layers.{layer.layer}."
    shared = load_arrays(made.shared) if made.shared else {}
    stored = [(tensor, arrays[tensor.role.removeprefix(prefix)]) for tensor in layer.resident]
    for tensor, codes in [*stored, *((tensor, shared[tensor.role]) for tensor in made.shared_resident)]:
        if tensor.format is not None:
            yield tensor.role, decode_rows(codes, tensor.shape[1], tensor.format)
    (family,) = sparsity.families
    pieces, start = slices(family, spec), 0
    names = slice_formats(format_at(sparsity.formats, layer.layer, family), len(pieces))
    for piece, name in zip(pieces, names, strict=True):
        role, (count, length) = f"{prefix}{piece.role}.weight", slice_shape(piece, spec)
        stop = start + count * slice_bytes(length, name)
        rows, columns = model.tensors[role].shape
        units = arrays[f"units.{family}"][: num_units(family, spec), start:stop]
        yield role, decode_rows(np.ascontiguousarray(out_of_units(units, piece, rows)), columns, name)
        start = stop


def _in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows whose heads pair neighbours, as llama.cpp stores some models', in Hugging Face's order."""
    if heads == 0:
        return rows
    by_head = rows.reshape(heads, -1, rows.shape[-1])
    return np.concatenate([by_head[:, 0::2], by_head[:, 1::2]], axis=1).reshape(rows.shape)
