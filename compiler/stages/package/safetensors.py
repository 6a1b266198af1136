"""Writes safetensors files as a stream: the header from known shapes, then one tensor after another.

The library's writer needs all tensors in memory and is not reproducible with several metadata keys; the format itself
is a length, a JSON header and the bytes. Tensors with larger elements come first, so that each starts at a multiple of
its element size; ties go by name.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from coldpress.compiler.stages.package.hashing import HashingFile
from coldpress.compiler.stages.package.mapped import MappedArray
from coldpress.runtime.artifact.tensor_files import make_header
from coldpress.schemas.errors import ColdpressError


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor whose values are loaded when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray | MappedArray]


def of_array(name: str, array: np.ndarray) -> TensorToWrite:
    return TensorToWrite(name, array.dtype.name, array.shape, lambda: array)


def write_tensors(file: HashingFile, tensors: Iterable[TensorToWrite]) -> None:
    """Writes a whole safetensors file, little-endian, without metadata.

    Raises:
        ColdpressError: if a loaded tensor does not have the shape and type in the header.
    """
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
