"""Lists the types of a GGUF file and the user's options; gguf.py says what is exact."""

from typing import Literal

from pydantic import Field

from coldpress.compiler.llama_cpp.types import BLOCKS
from coldpress.schemas.base import Record


def fits(type_name: str, length: int) -> bool:
    """Tells whether rows of `length` values are whole blocks of a GGUF type: GGUF's rows are not padded."""
    return length % BLOCKS[type_name][0] == 0


class Options(Record):
    """How the weights are written."""

    gguf_type: Literal["stored", "F16", "Q8_0", "Q4_0"] = Field(
        default="stored", description="type of the matrices in a GGUF file; stored: each as the artifact has it"
    )
    gguf_tokenizer: bool = Field(
        default=True, description="whether a GGUF file has the tokenizer; without, it takes token ids alone"
    )
