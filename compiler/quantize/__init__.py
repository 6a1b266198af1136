"""quantize: weights -> codes. Per layer the units of every family in natural order, and the tensors that stay in DRAM.

Reads the model's tensors by role, one matrix at a time, and the method and format that `allocate` chose; gives one
array file per layer and one for what all layers share. The algorithm (a file of this package) chooses codes; the format
(runtime/quantization) says what they mean. Row-column bundling is LLM-in-a-flash 3.2: a unit is its slices' bytes one
after another.
"""

import logging
from types import ModuleType
from typing import Annotated

import numpy as np
from pydantic import Field

from compiler._io import Workspace
from compiler.quantize._resident import layer_resident, shared_resident
from compiler.quantize._units import encode_resident, encode_units
from runtime._plugins import load
from schemas.base import Record
from schemas.config import Key
from schemas.model import Model
from schemas.quantized import LayerCodes, Quantized, ResidentTensor
from schemas.sparsity import Sparsity

logger = logging.getLogger(__name__)


class QuantizeConfig(Record):
    """Settings of `quantize`."""

    algorithm: Annotated[str, Key(plugins="compiler.quantize")] = Field(
        default="rtn", description="how codes are chosen; rtn: round to nearest"
    )


def run(
    config: QuantizeConfig, model: Model, sparsity: Sparsity, layers: tuple[int, ...], work: Workspace
) -> Quantized:
    """Codes of `layers`; the chunk that holds layer 0 also quantizes what all layers share.

    Raises:
        UnknownNameError: if there is no such algorithm.
        CheckpointError: if a value is beyond what the format can hold; the text names the tensor.
    """
    algorithm = load("compiler.quantize", config.algorithm)
    shared = shared_resident(model, sparsity.format) if 0 in layers else ()
    return Quantized(
        algorithm=config.algorithm,
        format=sparsity.format,
        layers=tuple(_quantize_layer(algorithm, model, sparsity, layer, work) for layer in layers),
        shared=work.once("shared", lambda: _encode_resident(algorithm, model, shared, "")) if shared else None,
        shared_resident=shared,
    )


def _quantize_layer(algorithm: ModuleType, model: Model, sparsity: Sparsity, layer: int, work: Workspace) -> LayerCodes:
    families = sparsity.families
    resident = layer_resident(model, layer, families, sparsity.format)

    def make() -> dict[str, np.ndarray]:
        logger.info("quantize: layer %d of %d", layer + 1, model.spec.num_hidden_layers)
        arrays = _encode_resident(algorithm, model, resident, f"layers.{layer}.")
        for family in families:
            arrays[f"units.{family}"] = encode_units(algorithm, model, layer, family, sparsity.format)
        return arrays

    return LayerCodes(layer=layer, arrays=work.once(f"layer-{layer}", make), resident=resident)


def _encode_resident(
    algorithm: ModuleType, model: Model, tensors: tuple[ResidentTensor, ...], prefix: str
) -> dict[str, np.ndarray]:
    """The tensors under their roles without `prefix`."""
    return {tensor.role.removeprefix(prefix): encode_resident(algorithm, model, tensor) for tensor in tensors}
