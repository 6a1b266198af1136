"""Encodes weights: the slices of each unit and the matrices that they come from.

Rows are read when they are needed. Columns need their whole matrix, so memory is at most one matrix in float32, the
codes of a layer, and the algorithm's own arrays.
"""

import logging

import numpy as np

from coldpress.compiler.checkpoint.tensors import read_role, rotary_inv_freq
from coldpress.compiler.rounding._matrix import Known, choose_codes
from coldpress.compiler.rounding._weights import Algorithm, Axis, Weights
from coldpress.runtime.artifact.contents import in_units, nbytes, unit_nbytes
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import (
    FamilyName,
    FormatName,
    UnitFormat,
    num_units,
    slice_formats,
    slice_shape,
    slices,
)
from coldpress.schemas.model import FREQUENCIES, Model, matrices
from coldpress.schemas.quantized import ResidentTensor

LOG = logging.getLogger(__name__)
SAMPLED_SLICES = 64
"""The most slices of a tensor whose rounding error is checked."""


def encode_units(
    algorithm: Algorithm, model: Model, layer: int, family: FamilyName, name: UnitFormat, known: Known
) -> np.ndarray:
    """Encodes one family of one layer: uint8 [num_units, unit_bytes] by unit id, slices in the family's order.

    Raises:
        CheckpointError: if a value is beyond the format's range.
    """
    pieces = slices(family, model.spec)
    shapes = [slice_shape(piece, model.spec) for piece in pieces]
    units = np.empty((num_units(family, model.spec), unit_nbytes(name, shapes)), np.uint8)
    stop = 0
    for piece, (count, length), own in zip(pieces, shapes, slice_formats(name, len(pieces)), strict=True):
        start, stop = stop, stop + count * nbytes(own, length)
        names = matrices(piece.role, model.spec)
        each = len(units) // len(names)
        for expert, matrix in enumerate(names):
            rows, role = slice(expert * each, (expert + 1) * each), f"layers.{layer}.{matrix}.weight"
            axis: Axis = "column" if piece.axis == "column" else "row"
            weights = known.weights(model, role, axis)
            units[rows, start:stop] = in_units(_encode(algorithm, weights, role, own), piece, each)
            del weights  # of columns it holds the matrix
    return units


def encode_resident(algorithm: Algorithm, model: Model, tensor: ResidentTensor, known: Known) -> np.ndarray:
    """Encodes a tensor that stays in DRAM: float32 unchanged, or a matrix's rows as codes uint8 [rows, row_bytes].

    Raises:
        CheckpointError: if a value is beyond the format's range.
    """
    for kind, role in FREQUENCIES.items():  # computed from the configuration, not stored in checkpoints
        if tensor.role == role:
            return np.asarray(rotary_inv_freq(model, kind), np.float32)
    if tensor.format is None:
        return read_role(model, tensor.role)
    return _encode(algorithm, known.weights(model, tensor.role, "row"), tensor.role, tensor.format)


def _encode(algorithm: Algorithm, weights: Weights, role: str, format_name: FormatName) -> np.ndarray:
    """Encodes all slices, uint8 [n, nbytes(length)]; warns if they lose more than trained weights usually do."""
    codes = choose_codes(algorithm, weights, role, format_name)
    codec = load("coldpress.runtime.quantization", Format, format_name)
    picked = np.unique(np.linspace(0, weights.count - 1, min(SAMPLED_SLICES, weights.count)).round().astype(int))
    values = np.concatenate([weights.read(at, at + 1) for at in picked.tolist()])
    error, norm = np.linalg.norm(codec.decode(codes[picked], weights.length) - values), np.linalg.norm(values)
    if error > codec.MAX_WEIGHT_ERROR * norm:
        LOG.warning(
            "quantize: warning: %s loses %.2g of its norm in %s, at most %g is usual; its values are too small, "
            "or a few of them too large, for the format",
            *(role, error / norm, format_name, codec.MAX_WEIGHT_ERROR),
        )
    return codes
