"""Collects the tensors of an artifact's files from the records, and checks that these belong together: one method, one
format, every layer once, predictors of these weights; and writes safetensors files as a stream.

The library's writer needs all tensors in memory and is not reproducible with several metadata keys; the format itself
is a length, a JSON header and the bytes. Tensors with larger elements come first, so that each starts at a multiple of
its element size; ties go by name.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from coldpress.compiler.activity.choice import selector_arrays
from coldpress.compiler.io import load_arrays
from coldpress.compiler.stages.package.hashing import HashingFile
from coldpress.compiler.stages.package.mapped import MappedArray
from coldpress.runtime.artifact.contents import nbytes, selector_tensor
from coldpress.runtime.artifact.tensor_files import make_header
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import Layout, RowTable, Section
from coldpress.schemas.model import Model, rows_on_flash
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.plans import Plans
from coldpress.schemas.predictors import LayerPredictor, Predictors
from coldpress.schemas.quantized import LayerCodes, Quantized, ResidentTensor
from coldpress.schemas.sparsity import Sparsity


@dataclass(frozen=True)
class TensorToWrite:
    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray | MappedArray]


def of_array(name: str, array: np.ndarray) -> TensorToWrite:
    return TensorToWrite(name, array.dtype.name, array.shape, lambda: array)


def write_tensors(file: HashingFile, tensors: Iterable[TensorToWrite]) -> None:
    """Writes a whole safetensors file, little-endian, without metadata. Raises ColdpressError if a loaded tensor does
    not have the shape and type in the header."""
    ordered = sorted(tensors, key=lambda tensor: (-np.dtype(tensor.dtype).itemsize, tensor.name))
    header, _ = make_header((tensor.name, tensor.dtype, tensor.shape) for tensor in ordered)
    file.write(header)
    for tensor in ordered:
        loaded = tensor.load()
        values = loaded.values if isinstance(loaded, MappedArray) else loaded
        if values.dtype.name != tensor.dtype or values.shape != tensor.shape:
            raise ColdpressError(
                f"tensor {tensor.name} is {values.dtype} {list(values.shape)}, expected {tensor.dtype} "
                f"{list(tensor.shape)}; its record was made for another model or format: run its stage again"
            )
        data = np.ascontiguousarray(values, np.dtype(tensor.dtype).newbyteorder("<"))
        file.write(data, loaded.copied if isinstance(loaded, MappedArray) else None)


@dataclass(frozen=True)
class Codes:
    algorithm: str
    layers: tuple[LayerCodes, ...]
    """By layer number."""
    shared: ArrayFile
    shared_resident: tuple[ResidentTensor, ...]
    """Without the matrices on flash that are read by row."""

    @property
    def resident(self) -> tuple[ResidentTensor, ...]:
        return (*self.shared_resident, *(tensor for layer in self.layers for tensor in layer.resident))

    def rows(self, table: RowTable) -> MappedArray:
        """Maps the codes of a matrix that is read by row, uint8 [num_rows, row_bytes]."""
        return MappedArray(self.shared, table.role)

    def units(self, section: Section) -> tuple[MappedArray, ...]:
        """Maps the codes of each layer of a section, uint8 [num_units, unit_bytes], in natural order."""
        return tuple(MappedArray(self.layers[layer].arrays, f"units.{section.family}") for layer in section.layers)


def join_codes(parts: tuple[Quantized, ...], model: Model, format_name: str) -> Codes:
    """Joins the codes of all layers. Raises ColdpressError if a layer is missing or appears twice, or chunks differ in
    algorithm or format."""
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
    on_flash = rows_on_flash(model.spec)
    resident = tuple(tensor for tensor in shared[0].shared_resident if tensor.role not in on_flash)
    return Codes(shared[0].algorithm, tuple(layers), shared[0].shared, resident)


def resident_to_write(codes: Codes) -> Iterator[TensorToWrite]:
    yield from (_stored(tensor, codes.shared, tensor.role) for tensor in codes.shared_resident)
    for layer in codes.layers:
        prefix = f"layers.{layer.layer}."
        yield from (_stored(tensor, layer.arrays, tensor.role.removeprefix(prefix)) for tensor in layer.resident)


def _stored(tensor: ResidentTensor, source: ArrayFile, name: str) -> TensorToWrite:
    def mapped() -> MappedArray:
        return MappedArray(source, name)

    if tensor.format is None:
        return TensorToWrite(tensor.role, "float32", tensor.shape, mapped)
    row_bytes = nbytes(tensor.format, tensor.shape[-1])
    return TensorToWrite(tensor.role, "uint8", (int(np.prod(tensor.shape[:-1])), row_bytes), mapped)


def unit_orders(parts: tuple[Order, ...]) -> Callable[[Section], np.ndarray]:
    """Returns a function that gives the unit at each flash position of a section, int32 [num_units], or raises
    ColdpressError if no record orders the section, or not by a permutation."""
    entries = {(entry.layer, entry.family): entry for part in parts for entry in part.entries}

    def order_of(section: Section) -> np.ndarray:
        entry = entries.get((section.first_layer, section.family))
        if entry is None or entry.num_layers != len(section.layers):
            found = f"one for {entry.num_layers} layers from there" if entry else "none"
            raise ColdpressError(f"no order for {section.name}, found {found}; give one record per chunk of layers")
        order = load_arrays(entry.arrays, "order")["order"].astype(np.int32)
        if not is_permutation(order, section.num_units):
            raise ColdpressError(
                f"{section.name}: the order is no permutation of {section.num_units} units; run order again"
            )
        return order

    return order_of


def is_permutation(ids: np.ndarray, num_units: int) -> bool:
    in_range = ids.shape == (num_units,) and ids.min() >= 0 and ids.max() < num_units
    return bool(in_range and np.bincount(ids, minlength=num_units).max() == 1)


def rank(placement: Placement, layer: int, section: Section) -> np.ndarray:
    """Returns a layer's unit ids in the order in which they deserve DRAM, int32 [num_units]. Raises ColdpressError if
    the placement does not fit the section."""
    name = f"rank.{layer}.{section.family}"
    found = load_arrays(placement.arrays, name)[name]
    if not is_permutation(found, section.num_units):
        raise ColdpressError(
            f"placement of {name}: found {list(found.shape)} ids that are no permutation of {section.num_units} units; "
            "run place again"
        )
    return found.astype(np.int32)


def tables_to_write(
    layout: Layout,
    plans: Plans,
    order_of: Callable[[Section], np.ndarray],
    placement: Placement,
    sparsity: Sparsity,
    page_crc32c: np.ndarray,
) -> Iterator[TensorToWrite]:
    yield of_array("page_crc32c", page_crc32c)
    for section in layout.sections:
        yield of_array(f"order.{section.first_layer}.{section.family}", order_of(section))
        for layer in section.layers:
            yield of_array(f"rank.{layer}.{section.family}", rank(placement, layer, section))
    for index, (plan, decision) in enumerate(zip(plans.plans, sparsity.decisions, strict=True)):
        fitted = selector_arrays(decision)
        for array in plan.arrays:
            yield of_array(selector_tensor(index, array), fitted[array.layer, array.family][array.name])


def check_predictors(predictors: Predictors, model: Model) -> tuple[LayerPredictor, ...]:
    """Returns the predictors of all layers. Raises ColdpressError if they were fitted to other weights."""
    if predictors.weights_sha256 != model.weights_sha256:
        raise ColdpressError(
            f"the predictors belong to weights {predictors.weights_sha256[:12]}, the model has "
            f"{model.weights_sha256[:12]}; run predict again"
        )
    return predictors.layers


def predictors_to_write(predictors: tuple[LayerPredictor, ...]) -> Iterator[TensorToWrite]:
    """Yields `<layer>.fc1` and `<layer>.fc2`, uint8 [rows, row_bytes]."""
    for predictor in predictors:
        arrays = load_arrays(predictor.arrays, "fc1", "fc2")
        yield from (of_array(f"{predictor.layer}.{name}", arrays[name]) for name in ("fc1", "fc2"))
