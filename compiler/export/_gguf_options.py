"""What a GGUF file may hold, and what a user may ask of it; gguf.py says what is exact."""

from typing import Literal

from pydantic import Field

from schemas.base import Record

TypeName = Literal["F32", "F16", "Q8_0", "Q4_0"]


class Options(Record):
    """How the weights are written."""

    gguf_type: Literal["stored", "F16", "Q8_0", "Q4_0"] = Field(
        default="stored", description="type of the matrices in a GGUF file; stored: each as the artifact has it"
    )
    gguf_tokenizer: bool = Field(
        default=True, description="whether a GGUF file has the tokenizer; without, it takes token ids alone"
    )
