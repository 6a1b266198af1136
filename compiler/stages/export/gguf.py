"""gguf: writes the model as one GGUF file, which llama.cpp loads.

GGUF has a type for each format (compiler/llama_cpp/formats.py): rows are copied, bit for bit. A matrix
encoded by column (so that columns can be read one by one) is decoded and encoded again along its input, which rounds a
second time; the file lists such tensors under `coldpress.rounded_tensors`. GGUF has no padded rows: a matrix whose rows
are not whole blocks becomes F16. All experts of a layer form one tensor, which is listed if one of its matrices was
rounded. Norms, biases and routers are F32, as in llama.cpp's own files. `_llama_cpp.py` knows what llama.cpp computes
for which architecture.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path

from coldpress.compiler.cost_model import slice_bytes, stored_format
from coldpress.compiler.llama_cpp.formats import formats, type_of
from coldpress.compiler.stages.export._gguf_options import Options, fits
from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.compiler.stages.export._target import Target
from coldpress.schemas.families import FormatName
from coldpress.schemas.model import ModelSpec


class Plugin(Target[Options]):
    """One GGUF file."""

    OPTIONS = Options

    def check(self, spec: ModelSpec) -> None:
        from coldpress.compiler.stages.export import _llama_cpp  # late, as below

        _llama_cpp.architecture_of(spec)

    def write(self, model: StoredModel, options: Options, path: Path) -> list[str]:
        from coldpress.compiler.stages.export import (
            _gguf_file,  # imported late: it loads the package gguf, which is not needed for the options
        )

        return _gguf_file.write(model, options, path)

    def disk_bytes(self, shapes: Mapping[str, tuple[int, ...]], stored: FormatName, options: Options) -> int:
        """Counts the bytes of a file's tensors."""
        total = 0
        for role, shape in shapes.items():
            kept = stored_format(role, stored)
            if kept is None or len(shape) == 1:
                total += 4 * prod(shape)
            else:
                kind = type_of(kept) if options.gguf_type == "stored" else options.gguf_type
                chosen = formats()[kind] if fits(kind, shape[-1]) else "fp16"
                total += prod(shape[:-1]) * slice_bytes(shape[-1], chosen)
        return total
