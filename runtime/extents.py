"""Device reads: where each starts, how long it is, where it lands. The planner makes them, and flash reads them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Extents:
    """Reads of one file, in ascending order; in memory their bytes follow each other without gaps."""

    offsets: np.ndarray
    """int64 [n], byte offsets in the file, multiples of the page size."""
    lengths: np.ndarray
    """int64 [n], bytes, multiples of the page size."""

    @cached_property
    def buffer_offsets(self) -> np.ndarray:
        """int64 [n], where each read lands in the buffer."""
        return self.lengths.cumsum() - self.lengths

    @cached_property
    def num_bytes(self) -> int:
        """Returns the bytes of all reads together."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return self.offsets.size


def span_bytes(unit_bytes: int, page_bytes: int) -> int:
    """Returns the most bytes of whole pages that `unit_bytes` can touch: the least size of a read buffer.

    A unit whose first byte is the last of a page touches one page for it, and ceil((unit_bytes - 1) / page_bytes) more.
    """
    return (-(-(unit_bytes - 1) // page_bytes) + 1) * page_bytes
