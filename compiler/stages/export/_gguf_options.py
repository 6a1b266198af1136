"""Lists the types of a GGUF file and the user's options; gguf.py says what is exact."""

from typing import Literal

from pydantic import Field

from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError

TypeName = Literal["F32", "F16", "Q8_0", "Q4_0"]


FORMATS: dict[TypeName, str] = {"F16": "fp16", "Q8_0": "int8_group32", "Q4_0": "int4_group32"}
"""Our format with the same values and row layout as a GGUF type."""
BLOCK = 32
"""Values that share a scale in Q8_0 and Q4_0. GGUF rows are not padded to whole blocks."""


def own_type(role: str, format_name: str) -> TypeName:
    """Returns the GGUF type with a format's values and layout.

    Raises:
        ColdpressError: if GGUF has no such type.
    """
    for name, known in FORMATS.items():
        if known == format_name:
            return name
    raise ColdpressError(
        f"{role} is stored as {format_name}, which GGUF has no type for, expected one of "
        f"{', '.join(FORMATS.values())}; give gguf_type=F16, Q8_0 or Q4_0 to have it rounded again"
    )


class Options(Record):
    """How the weights are written."""

    gguf_type: Literal["stored", "F16", "Q8_0", "Q4_0"] = Field(
        default="stored", description="type of the matrices in a GGUF file; stored: each as the artifact has it"
    )
    gguf_tokenizer: bool = Field(
        default=True, description="whether a GGUF file has the tokenizer; without, it takes token ids alone"
    )
