"""Writes a GGUF file's model with noise in its matrices, so that no type of llama.cpp has their values.

A file that is quantized says nothing of rounding: a format that has its codes is exact, and every other one loses more
than on weights that were trained.
"""

from pathlib import Path

import numpy as np

GROUP = 32
STEPS = 15
"""Steps between the least and the largest value of a group, as in four bits."""
OWN_KEYS = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")
"""Keys that the writer sets, or that tell of the old file's tensors."""


def write(source: Path, target: Path, seed: int = 0) -> None:
    """Writes the file's model as F16: the layers' matrices with uniform noise, of half a step of their group to either
    side, and all else as it is. Memory holds one tensor."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize

    reader, rng = GGUFReader(source), np.random.default_rng(seed)
    architecture = reader.get_field("general.architecture")
    assert architecture is not None, "every GGUF file has one"
    writer = GGUFWriter(target, architecture.contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in OWN_KEYS:
            kind = field.types[0]
            writer.add_key_value(
                field.name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        shape = [int(length) for length in reversed(tensor.shape)]
        dtype = _dtype(shape)
        writer.add_tensor_info(tensor.name, shape, dtype, dtype.itemsize * int(tensor.n_elements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        values = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        if values.ndim > 1 and tensor.name.startswith("blk."):
            values = noised(values, rng)
        writer.write_tensor_data(values.astype(_dtype(values.shape)))
    writer.close()


def noised(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a matrix, float32 [rows, columns], with noise; `columns` is a multiple of GROUP."""
    groups = values.reshape(*values.shape[:-1], -1, GROUP)
    steps = (groups.max(axis=-1, keepdims=True) - groups.min(axis=-1, keepdims=True)) / STEPS
    noise = rng.random(groups.shape, np.float32) - np.float32(0.5)
    return (groups + noise * steps).reshape(values.shape)


def _dtype(shape: "list[int] | tuple[int, ...]") -> "np.dtype[np.float16 | np.float32]":
    return np.dtype(np.float16 if len(shape) > 1 else np.float32)
