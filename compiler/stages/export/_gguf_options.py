"""Lists the types of a GGUF file and the user's options; gguf.py says what is exact."""

from typing import Literal

from pydantic import Field

from coldpress.compiler.llama_cpp.formats import formats
from coldpress.compiler.llama_cpp.types import BLOCKS
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError


def fits(type_name: str, length: int) -> bool:
    """Tells whether rows of `length` values are whole blocks of a GGUF type: GGUF's rows are not padded."""
    return length % BLOCKS[type_name][0] == 0


def own_type(role: str, format_name: str) -> str:
    """Returns the GGUF type with a format's values and layout.

    Raises:
        ColdpressError: if GGUF has no such type.
    """
    for name, known in formats().items():
        if known == format_name:
            return name
    raise ColdpressError(
        f"{role} is stored as {format_name}, which GGUF has no type for, expected one of "
        f"{', '.join(formats().values())}; give gguf_type=F16, Q8_0 or Q4_0 to have it rounded again"
    )


class Options(Record):
    """How the weights are written."""

    gguf_type: Literal["stored", "F16", "Q8_0", "Q4_0"] = Field(
        default="stored", description="type of the matrices in a GGUF file; stored: each as the artifact has it"
    )
    gguf_tokenizer: bool = Field(
        default=True, description="whether a GGUF file has the tokenizer; without, it takes token ids alone"
    )
