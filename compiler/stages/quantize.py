"""quantize: encodes weights. Per layer the units of every family in natural order, and the tensors that stay in DRAM.

The algorithm (compiler/rounding) chooses codes; the format (runtime/quantization) defines their meaning. The importance
of inputs is the user's importance matrix, or else what `calibrate` measured; a distilled model is rounded by the inputs
of the model that was calibrated. Row-column bundling is LLM-in-a-flash 3.2: a unit's slices lie one after another. Rows
are read when they are needed. Columns need their whole matrix, so memory is at most one matrix in float32, the codes of
a layer, and the algorithm's own arrays.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.checkpoint.tensors import read_role, rotary_inv_freq
from coldpress.compiler.cost_model import whole_tensors
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.rounding._matrix import InputStatistics, choose_codes, grams_of, matrix_of
from coldpress.compiler.rounding._weights import Algorithm, Axis, Weights
from coldpress.compiler.shared_settings import AlgorithmSetting
from coldpress.runtime.artifact.contents import in_units, nbytes, unit_nbytes
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._mixed import format_at
from coldpress.schemas.activations import Activations
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import (
    FamilyName,
    FormatName,
    UnitFormat,
    layers_of,
    num_units,
    slice_formats,
    slice_shape,
    slices,
)
from coldpress.schemas.gram import GramMatrices, Importance, measured_roles
from coldpress.schemas.model import FREQUENCIES, Model, RotaryKind, matrices
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.quantized import LayerCodes, Quantized, ResidentTensor
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
SAMPLED_SLICES = 64
"""The most slices of a tensor whose rounding error is checked."""


class QuantizeConfig(AlgorithmSetting):
    """Settings of `quantize`."""


def run(
    config: QuantizeConfig,
    model: Model,
    sparsity: Sparsity,
    layers: tuple[int, ...],
    work: Workspace,
    gram: GramMatrices | None = None,
    importance: Importance | None = None,
    activations: Activations | None = None,
) -> Quantized:
    """Encodes `layers`; the chunk that holds layer 0 also encodes the tensors that all layers share.

    Raises:
        UnknownNameError: if there is no such algorithm.
        ColdpressError: if the algorithm needs Gram matrices and none of these weights were given.
        CheckpointError: if a value is beyond the format's range; the text names the tensor.
    """
    algorithm = load("coldpress.compiler.rounding", Algorithm, config.algorithm)
    if algorithm.NEEDS_GRAM and (gram is None or gram.weights_sha256 != model.weights_sha256):
        found = "none were given" if gram is None else "those given are of other weights"
        raise ColdpressError(
            f"algorithm={config.algorithm} needs Gram matrices of the model's inputs, and {found}; run gram first"
        )
    whole = tuple(whole_tensors(model, sparsity.families, sparsity.formats))
    shared = tuple(tensor for tensor in whole if not tensor.role.startswith("layers.")) if 0 in layers else ()
    known_of = functools.partial(_known, model, gram if algorithm.NEEDS_GRAM else None, importance, activations)

    def make_shared() -> dict[str, np.ndarray]:
        head = load_arrays(importance.shared) if importance and importance.shared else {}
        return _encode_resident(algorithm, model, shared, "", InputStatistics(importance=head))

    return Quantized(
        algorithm=config.algorithm,
        format=sparsity.format,
        layers=tuple(_quantize_layer(algorithm, model, sparsity, whole, layer, work, known_of) for layer in layers),
        shared=work.once("shared", make_shared) if shared else None,
        shared_resident=shared,
    )


def needs(build: "Build") -> StageNeeds:
    largest = build.largest_of_layer
    grams = build.gram_bytes if build.has("gram") else []
    reading = 4 * 4 * largest + sum(grams) + 2 * max(grams) if grams else (4 + 2) * largest
    held = max(reading + build.layer_code_bytes, 2 * sum(build.shared_code_bytes))
    return StageNeeds(
        stage="quantize", ram_bytes=build.PYTHON_BYTES + build.BLOCK_BYTES + held, disk_bytes=build.code_bytes
    )


def _quantize_layer(
    algorithm: Algorithm,
    model: Model,
    sparsity: Sparsity,
    whole: Sequence[ResidentTensor],
    layer: int,
    work: Workspace,
    known_of: Callable[[int], InputStatistics],
) -> LayerCodes:
    families = tuple(family for family in sparsity.families if layer in layers_of(family, model.spec))
    formats = {family: format_at(sparsity.formats, layer, family) for family in families}
    prefix = f"layers.{layer}."
    resident = tuple(tensor for tensor in whole if tensor.role.startswith(prefix))

    def make() -> dict[str, np.ndarray]:
        LOG.info("quantize: layer %d of %d", layer + 1, model.spec.num_hidden_layers)
        known = known_of(layer)
        arrays = _encode_resident(algorithm, model, resident, prefix, known)
        for family, name in formats.items():
            arrays[f"units.{family}"] = encode_units(algorithm, model, layer, family, name, known)
        return arrays

    return LayerCodes(layer=layer, arrays=work.once(f"layer-{layer}", make), resident=resident)


def _encode_resident(
    algorithm: Algorithm, model: Model, tensors: tuple[ResidentTensor, ...], prefix: str, known: InputStatistics
) -> dict[str, np.ndarray]:
    """Encodes tensors that stay in DRAM: float32 unchanged, or a matrix's rows as codes uint8 [rows, row_bytes]."""
    frequencies: dict[str, RotaryKind] = {role: kind for kind, role in FREQUENCIES.items()}
    found: dict[str, np.ndarray] = {}
    for tensor in tensors:
        role = tensor.role
        if role in frequencies:  # computed from the configuration, not stored in checkpoints
            values = np.asarray(rotary_inv_freq(model, frequencies[role]), np.float32)
        elif tensor.format is None:
            values = read_role(model, role)
        else:
            values = _encode(algorithm, known.weights(model, role, "row"), role, tensor.format)
        found[role.removeprefix(prefix)] = values
    return found


def _known(
    model: Model, gram: GramMatrices | None, importance: Importance | None, activations: Activations | None, layer: int
) -> InputStatistics:
    names = {matrix_of(role) for role in model.tensors if role.startswith(f"layers.{layer}.")}
    names &= measured_roles(model.spec)
    given = load_arrays(importance.layers[layer].arrays) if importance else {}
    return InputStatistics(grams_of(gram, layer, names), given, activations)


def encode_units(
    algorithm: Algorithm, model: Model, layer: int, family: FamilyName, name: UnitFormat, known: InputStatistics
) -> np.ndarray:
    """Encodes one family of one layer: uint8 [num_units, unit_bytes] by unit id, slices in the family's order. Raises
    CheckpointError if a value is beyond the format's range."""
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
