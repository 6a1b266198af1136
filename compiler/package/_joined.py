"""What goes into an artifact's tensor files, and from which record each tensor comes.

Checks that the records belong together: one method, one format, every layer once, predictors of these weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from compiler._io import load_arrays
from compiler.activity.choice import selector_arrays
from compiler.package._mapped import MappedArray
from compiler.package._safetensors import TensorToWrite, of_array
from runtime._plugins import load
from runtime.artifact.contents import selector_tensor
from schemas.base import ArrayFile
from schemas.errors import ColdpressError
from schemas.layout import Layout, Section
from schemas.model import Model
from schemas.order import Order
from schemas.placement import Placement
from schemas.predictors import LayerPredictor, Predictors
from schemas.quantized import LayerCodes, Quantized, ResidentTensor
from schemas.sparsity import Sparsity


@dataclass(frozen=True)
class Codes:
    """The chunks of `quantize` put together."""

    algorithm: str
    layers: tuple[LayerCodes, ...]
    """By layer number."""
    shared: ArrayFile
    shared_resident: tuple[ResidentTensor, ...]

    @property
    def resident(self) -> tuple[ResidentTensor, ...]:
        """All tensors that stay in DRAM: what layers share, then layer by layer."""
        return (*self.shared_resident, *(tensor for layer in self.layers for tensor in layer.resident))

    def units(self, section: Section) -> MappedArray:
        """uint8 [num_units, unit_bytes] of a section, in natural order."""
        return MappedArray(self.layers[section.layer].arrays, f"units.{section.family}")


def join_codes(parts: tuple[Quantized, ...], model: Model, format_name: str) -> Codes:
    """All layers' codes.

    Raises:
        ColdpressError: if a layer is missing or there twice, or chunks differ in algorithm or format.
    """
    layers = sorted((entry for part in parts for entry in part.layers), key=lambda entry: entry.layer)
    shared = [part for part in parts if part.shared is not None]
    found, expected = [entry.layer for entry in layers], list(range(model.spec.num_hidden_layers))
    if found != expected or len(shared) != 1 or shared[0].shared is None:
        raise ColdpressError(
            f"the quantized records cover layers {found} and {len(shared)} of them hold the shared tensors, expected "
            f"each of {len(expected)} layers once and one; give one record per chunk"
        )
    kinds = {(part.algorithm, part.format) for part in parts}
    if len(kinds) != 1 or shared[0].format != format_name:
        raise ColdpressError(
            f"the quantized records are in {sorted(kinds)}, expected one algorithm and the format {format_name}; "
            "run quantize again"
        )
    return Codes(shared[0].algorithm, tuple(layers), shared[0].shared, shared[0].shared_resident)


def resident_to_write(codes: Codes) -> Iterator[TensorToWrite]:
    """Every resident tensor under its role."""
    yield from (_stored(tensor, codes.shared, tensor.role) for tensor in codes.shared_resident)
    for layer in codes.layers:
        prefix = f"layers.{layer.layer}."
        yield from (_stored(tensor, layer.arrays, tensor.role.removeprefix(prefix)) for tensor in layer.resident)


def _stored(tensor: ResidentTensor, source: ArrayFile, name: str) -> TensorToWrite:
    def mapped() -> MappedArray:
        return MappedArray(source, name)

    if tensor.format is None:
        return TensorToWrite(tensor.role, "float32", tensor.shape, mapped)
    row_bytes = load("runtime.quantization", tensor.format).nbytes(tensor.shape[-1])
    return TensorToWrite(tensor.role, "uint8", (int(np.prod(tensor.shape[:-1])), row_bytes), mapped)


@dataclass(frozen=True)
class UnitOrders:
    """The chunks of `order` put together."""

    arrays: dict[tuple[int, str], ArrayFile]

    def order(self, section: Section) -> np.ndarray:
        """int32 [num_units], the unit at each flash position.

        Raises:
            ColdpressError: if no record orders this section.
        """
        source = self.arrays.get((section.layer, section.family))
        if source is None:
            raise ColdpressError(
                f"no order for layer {section.layer}, family {section.family}; give one record per chunk of layers"
            )
        return load_arrays(source, "order")["order"].astype(np.int32)


def join_orders(parts: tuple[Order, ...]) -> UnitOrders:
    """All sections' orders."""
    return UnitOrders({(entry.layer, entry.family): entry.arrays for part in parts for entry in part.entries})


def pinned_mask(placement: Placement, section: Section) -> np.ndarray:
    """uint8 [num_units]: 1 where a unit is kept in DRAM or on an accelerator, for which DRAM stands in.

    Raises:
        ColdpressError: if the placement does not fit the section.
    """
    name = f"{section.layer}.{section.family}"
    tiers = load_arrays(placement.arrays, name)[name]
    if tiers.shape != (section.num_units,) or tiers.min() < 0 or tiers.max() >= len(placement.tiers):
        raise ColdpressError(
            f"placement of {name}: found tiers {tiers.shape} from {tiers.min()} to {tiers.max()}, expected "
            f"{section.num_units} below {len(placement.tiers)}; run place again"
        )
    on_flash = np.array([tier == "flash" for tier in placement.tiers])
    return (~on_flash[tiers]).astype(np.uint8)


def tables_to_write(
    layout: Layout, orders: UnitOrders, placement: Placement, sparsity: Sparsity, page_crc32c: np.ndarray
) -> Iterator[TensorToWrite]:
    """Page checksums, unit orders, pinned units, and what the selector keeps."""
    yield of_array("page_crc32c", page_crc32c)
    for section in layout.sections:
        name = f"{section.layer}.{section.family}"
        yield of_array(f"order.{name}", orders.order(section))
        yield of_array(f"pinned.{name}", pinned_mask(placement, section))
    fitted = selector_arrays(sparsity)
    for index, plan in enumerate(layout.plans):
        for array in plan.arrays:
            yield of_array(selector_tensor(index, array), fitted[array.layer, array.family][array.name])


def join_predictors(parts: tuple[Predictors, ...], model: Model) -> tuple[LayerPredictor, ...]:
    """All layers' predictors; none where the method has none.

    Raises:
        ColdpressError: if they were fitted to other weights.
    """
    for part in parts:
        if part.weights_sha256 != model.weights_sha256:
            raise ColdpressError(
                f"the predictors belong to weights {part.weights_sha256[:12]}, the model has "
                f"{model.weights_sha256[:12]}; run predict again"
            )
    return tuple(sorted((entry for part in parts for entry in part.layers), key=lambda entry: entry.layer))


def predictors_to_write(predictors: tuple[LayerPredictor, ...]) -> Iterator[TensorToWrite]:
    """`<layer>.fc1` and `<layer>.fc2`, uint8 [rows, row_bytes]."""
    for predictor in predictors:
        arrays = load_arrays(predictor.arrays, "fc1", "fc2")
        yield from (of_array(f"{predictor.layer}.{name}", arrays[name]) for name in ("fc1", "fc2"))
