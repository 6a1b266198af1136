"""Decides the contents of a GGUF file and writes it; gguf.py says which types exist and what is exact."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np

from coldpress.compiler.llama_cpp.architectures import Architecture
from coldpress.compiler.llama_cpp.types import formats, type_of
from coldpress.compiler.stages.export import _gguf_vocabulary, _llama_cpp
from coldpress.compiler.stages.export._stored import StoredModel, StoredTensor
from coldpress.compiler.stages.export.gguf import Options, fits
from coldpress.runtime import plugins
from coldpress.runtime.quantization import Format


def file_type(name: str) -> gguf.LlamaFileType:
    """Returns llama.cpp's name for a file whose matrices mostly have this type."""
    names = (f"ALL_{name}", f"MOSTLY_{name}", f"MOSTLY_{name}_M")
    return next(gguf.LlamaFileType[one] for one in names if one in gguf.LlamaFileType.__members__)


@dataclass(frozen=True)
class Planned:
    name: str
    roles: tuple[str, ...]
    """Roles of the matrices it holds: one, those of all experts, or those whose rows it joins."""
    stored: StoredTensor
    """Storage of the first role; all others are stored the same way."""
    type: str
    """One of GGUF's."""
    rotated_heads: int
    """Heads whose rows llama.cpp expects in another order; 0 for most tensors."""
    shape: tuple[int, ...]
    """Rows and columns; the matrices of several experts have their number in front."""

    @property
    def copied(self) -> bool:
        return (
            self.stored.format is not None
            and self.stored.format == formats().get(self.type)
            and not self.stored.by_column
        )

    @property
    def exact(self) -> bool:
        """Tells whether its values equal the artifact's."""
        lossless = {("F32", None), ("F16", "fp16")}
        return self.copied or (self.type, self.stored.format) in lossless


def write(model: StoredModel, options: Options, path: Path) -> list[str]:
    """Writes the file; returns the names of the tensors whose values were rounded again.

    Raises:
        ColdpressError: if llama.cpp has no such architecture or tokenizer, or GGUF no type for the weights.
    """
    architecture = _llama_cpp.architecture_of(model.spec)
    _llama_cpp.check_biases(model, architecture)
    writer = gguf.GGUFWriter(path, architecture.name)
    try:
        _llama_cpp.add_shape(writer, model)
        planned = [_planned(model, architecture, roles, options) for roles in _llama_cpp.roles(model, architecture)]
        rounded = [tensor.name for tensor in planned if not tensor.exact]
        _add_facts(writer, model, planned, rounded)
        if options.gguf_tokenizer:
            _gguf_vocabulary.add(writer, model.artifact)
        else:
            writer.add_tokenizer_model("none")
        extra = _llama_cpp.rope_factors(model)
        for tensor in planned:
            _declare(writer, tensor)
        for name, values in extra.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in planned:
            _append(writer, (_encoded(model, tensor, role) for role in tensor.roles))
        for values in extra.values():
            _append(writer, (values,))
    finally:
        writer.close()
    return rounded


def _planned(model: StoredModel, architecture: Architecture, roles: tuple[str, ...], options: Options) -> Planned:
    stored = model.tensors[roles[0]]
    heads = architecture.rotated_heads(model.spec, roles[0])
    name, kind = _llama_cpp.tensor_name(architecture, roles[0]), _type_of(stored, options)
    if ".experts." in roles[0]:
        return Planned(name, roles, stored, kind, heads, (len(roles), *stored.shape))
    num_rows = sum(model.tensors[role].shape[0] for role in roles)
    return Planned(name, roles, stored, kind, heads, (num_rows, *stored.shape[1:]))


def _type_of(stored: StoredTensor, options: Options) -> str:
    if stored.format is None:
        return "F32"
    wanted = type_of(stored.format) if options.gguf_type == "stored" else options.gguf_type
    return wanted if fits(wanted, stored.shape[1]) else "F16"


def _add_facts(writer: gguf.GGUFWriter, model: StoredModel, planned: list[Planned], rounded: list[str]) -> None:
    manifest = model.artifact.manifest
    writer.add_name(manifest.source.name)
    if manifest.source.license:
        writer.add_license(manifest.source.license)
    types: Counter[str] = Counter(tensor.type for tensor in planned if tensor.stored.format is not None)
    writer.add_file_type(file_type(types.most_common(1)[0][0]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("coldpress.artifact_sha256", model.artifact.sha256)
    writer.add_uint32("coldpress.num_rounded_tensors", len(rounded))
    writer.add_array("coldpress.rounded_tensors", rounded)


def _declare(writer: gguf.GGUFWriter, tensor: Planned) -> None:
    shape = tensor.shape
    if tensor.type in ("F32", "F16"):
        dtype = np.dtype(np.float32 if tensor.type == "F32" else np.float16)
        writer.add_tensor_info(tensor.name, shape, dtype, prod(shape) * dtype.itemsize)
        return
    row_bytes = plugins.load("coldpress.runtime.quantization", Format, formats()[tensor.type]).nbytes(shape[-1])
    kind = gguf.GGMLQuantizationType[tensor.type]
    coded = (*shape[:-1], row_bytes)
    writer.add_tensor_info(tensor.name, coded, np.dtype(np.uint8), prod(coded), kind)


def _append(writer: gguf.GGUFWriter, matrices: Iterable[np.ndarray]) -> None:
    """Writes the next tensor, a matrix at a time: all experts of a layer may exceed memory many times."""
    file = (writer.fout or [])[0]
    writer.write_padding(file, file.tell())
    for matrix in matrices:
        matrix.tofile(file)
    writer.write_padding(file, file.tell())


def _encoded(model: StoredModel, tensor: Planned, role: str) -> np.ndarray:
    if tensor.copied:
        return np.ascontiguousarray(_llama_cpp.neighbours(model.codes(role), tensor.rotated_heads))
    values = _llama_cpp.neighbours(model.values(role), tensor.rotated_heads)
    if tensor.type == "F32":
        return np.ascontiguousarray(_llama_cpp.norm_weights(model.spec, role, values), "<f4")
    return plugins.load("coldpress.runtime.quantization", Format, formats()[tensor.type]).encode(
        np.ascontiguousarray(values)
    )
