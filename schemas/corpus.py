"""Token blocks: disjoint text for calibration, validation and test, with digests."""

from typing import Literal

from coldpress.schemas.base import ArrayFile, PositiveCount, Record, Sha256

Split = Literal["calibration", "validation", "test"]
SPLITS: tuple[Split, ...] = ("calibration", "validation", "test")


class TokenBlocks(Record):
    """One split: `tokens` int32 [num_blocks, block_tokens] in the array file.

    If documents name their task, `tasks` int16 of the same shape: for each token the index of its task, -1 for none.
    """

    split: Split
    arrays: ArrayFile
    num_blocks: PositiveCount
    block_tokens: PositiveCount
    tasks: tuple[str, ...] = ()
    """Names of the tasks in the text, sorted; empty if no document names a task."""


class Corpus(Record):
    """The result of `tokenize`; the splits come from disjoint text."""

    name: str
    revision: str | None = None
    text_sha256: Sha256
    """Digest of the text from which all splits were cut."""
    splits: tuple[TokenBlocks, ...]

    def split(self, name: Split) -> TokenBlocks:
        return next(blocks for blocks in self.splits if blocks.split == name)
