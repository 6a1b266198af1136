"""The result of `draft`: how often a draft model guesses what the model would choose, and what its guesses cost.

Arrays: `right` bool [num_blocks, block_tokens], whether the draft's likeliest token after a token of validation text is
the model's; `certainty` float32 of the same shape, the probability that the draft model gives it.
"""

from pydantic import Field

from coldpress.schemas.base import ArrayFile, PositiveCount, Record


class Drafter(Record):
    name: str
    """The draft model's."""
    dram_bytes: PositiveCount
    """DRAM in which it holds all of its units, with the KV cache; rows of embeddings are read."""
    token_s: float = Field(gt=0)
    """Modelled seconds of one of its tokens on the device."""
    num_tokens: PositiveCount
    arrays: ArrayFile
