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
from typing import Literal

from pydantic import Field

from coldpress.compiler.cost_model import slice_bytes, stored_format
from coldpress.compiler.llama_cpp.formats import formats, type_of
from coldpress.compiler.llama_cpp.types import BLOCKS
from coldpress.compiler.stages.export import Target
from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.schemas.base import Record
from coldpress.schemas.families import FormatName
from coldpress.schemas.model import ModelSpec


def fits(type_name: str, length: int) -> bool:
    """Tells whether rows of `length` values are whole blocks of a GGUF type: GGUF's rows are not padded."""
    return length % BLOCKS[type_name][0] == 0


class Options(Record):
    """Settings of the file that `gguf` writes."""

    gguf_type: Literal["stored", "F16", "Q8_0", "Q4_0"] = Field(
        default="stored", description="type of the matrices in a GGUF file; stored: each as the artifact has it"
    )
    gguf_tokenizer: bool = Field(
        default=True, description="whether a GGUF file has the tokenizer; without, it takes token ids alone"
    )


class Plugin(Target[Options]):
    OPTIONS = Options

    def check(self, spec: ModelSpec) -> None:
        from coldpress.compiler.stages.export import _llama_cpp  # late, as below

        _llama_cpp.architecture_of(spec)

    def write(self, model: StoredModel, options: Options, path: Path) -> list[str]:
        # late, since it loads the package gguf, which the options do not need
        from coldpress.compiler.stages.export import _gguf_file

        return _gguf_file.write(model, options, path)

    def disk_bytes(self, shapes: Mapping[str, tuple[int, ...]], stored: FormatName, options: Options) -> int:
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
