"""Token blocks: calibration, validation and test text, disjoint and hashed."""

from typing import Literal

from coldpress.schemas.base import ArrayFile, PositiveCount, Record, Sha256

Split = Literal["calibration", "validation", "test"]
SPLITS: tuple[Split, ...] = ("calibration", "validation", "test")


class TokenBlocks(Record):
    """One split: `tokens` int32 [num_blocks, block_tokens] in the array file.

    Where documents name their task, `tasks` int16 alike: the index in `tasks` of each token's, -1 for none.
    """

    split: Split
    arrays: ArrayFile
    num_blocks: PositiveCount
    block_tokens: PositiveCount
    tasks: tuple[str, ...] = ()
    """Names of the tasks in the text, sorted; empty where no document names one."""


class Corpus(Record):
    """What `tokenize` gives; the splits come from disjoint text."""

    name: str
    text_sha256: Sha256
    """Digest of the text that all splits were cut from."""
    splits: tuple[TokenBlocks, ...]

    def split(self, name: Split) -> TokenBlocks:
        """The blocks of one split."""
        return next(blocks for blocks in self.splits if blocks.split == name)
