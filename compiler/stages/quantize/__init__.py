"""quantize: encodes weights. Per layer the units of every family in natural order, and the tensors that stay in DRAM.

Reads the model's tensors by role, one matrix at a time, the method and format that `allocate` chose, Gram matrices if
the algorithm asks for them, and the importance of inputs: the user's importance matrix, or else what `calibrate`
measured; a distilled model is rounded by the inputs of the model that was calibrated. Writes one array file per layer
and one for the tensors that all layers share. The algorithm (compiler/rounding) chooses codes; the format
(runtime/quantization) defines their meaning. Row-column bundling is LLM-in-a-flash 3.2: a unit's slices lie one after
another.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.cost_model import whole_tensors
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.rounding._matrix import Known, grams_of, matrix_of
from coldpress.compiler.rounding._weights import Algorithm
from coldpress.compiler.shared_settings import AlgorithmSetting
from coldpress.compiler.stages.quantize._units import encode_resident, encode_units
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization._mixed import format_at
from coldpress.schemas.activations import Activations
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import layers_of
from coldpress.schemas.gram import GramMatrices, Importance, measured_roles
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.quantized import LayerCodes, Quantized, ResidentTensor
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

logger = logging.getLogger(__name__)
VALUES_PER_S = 1e8
"""Values that one core rounds to nearest in a second, with their scales: four layers of a 7B took 10 s."""


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
        return _encode_resident(algorithm, model, shared, "", Known(importance=head))

    return Quantized(
        algorithm=config.algorithm,
        format=sparsity.format,
        layers=tuple(_quantize_layer(algorithm, model, sparsity, whole, layer, work, known_of) for layer in layers),
        shared=work.once("shared", make_shared) if shared else None,
        shared_resident=shared,
    )


def needs(build: "Build") -> StageNeeds:
    """Counts the largest matrix and a layer's codes, or the shared tensors; and Gram matrices, if there are any."""
    largest = build.largest_of_layer
    grams = build.gram_bytes if build.has("gram") else []
    reading = 4 * 4 * largest + sum(grams) + 2 * max(grams) if grams else (4 + 2) * largest
    held = max(reading + build.layer_code_bytes, 2 * sum(build.shared_code_bytes))
    corrected = build.correction_s if grams else 0
    values = build.layers_per_job * sum(map(prod, build.layer_shapes))
    seconds = build.TORCH_S + build.layers_per_job * corrected + values / VALUES_PER_S
    return StageNeeds(
        stage="quantize",
        ram_bytes=build.PYTHON_BYTES + build.BLOCK_BYTES + held,
        disk_bytes=build.code_bytes,
        runtime_s=seconds,
    )


def _quantize_layer(
    algorithm: Algorithm,
    model: Model,
    sparsity: Sparsity,
    whole: Sequence[ResidentTensor],
    layer: int,
    work: Workspace,
    known_of: Callable[[int], Known],
) -> LayerCodes:
    families = tuple(family for family in sparsity.families if layer in layers_of(family, model.spec))
    formats = {family: format_at(sparsity.formats, layer, family) for family in families}
    prefix = f"layers.{layer}."
    resident = tuple(tensor for tensor in whole if tensor.role.startswith(prefix))

    def make() -> dict[str, np.ndarray]:
        logger.info("quantize: layer %d of %d", layer + 1, model.spec.num_hidden_layers)
        known = known_of(layer)
        arrays = _encode_resident(algorithm, model, resident, prefix, known)
        for family, name in formats.items():
            arrays[f"units.{family}"] = encode_units(algorithm, model, layer, family, name, known)
        return arrays

    return LayerCodes(layer=layer, arrays=work.once(f"layer-{layer}", make), resident=resident)


def _encode_resident(
    algorithm: Algorithm, model: Model, tensors: tuple[ResidentTensor, ...], prefix: str, known: Known
) -> dict[str, np.ndarray]:
    return {tensor.role.removeprefix(prefix): encode_resident(algorithm, model, tensor, known) for tensor in tensors}


def _known(
    model: Model,
    gram: GramMatrices | None,
    importance: Importance | None,
    activations: Activations | None,
    layer: int,
) -> Known:
    names = {matrix_of(role) for role in model.tensors if role.startswith(f"layers.{layer}.")}
    names &= measured_roles(model.spec)
    given = load_arrays(importance.layers[layer].arrays) if importance else {}
    return Known(grams_of(gram, layer, names), given, activations)
