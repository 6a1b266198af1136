"""Device reads: where each starts, how long it is, where it lands. The planner makes them, and flash reads them."""

import numpy as np


class Extents:
    """Reads of one file, in ascending order; in memory their bytes follow each other without gaps."""

    def __init__(self, offsets: np.ndarray, lengths: np.ndarray) -> None:
        """Takes byte offsets in the file and bytes of each read, int64 [n], multiples of the page size."""
        self.offsets, self.lengths = offsets, lengths
        ends = lengths.cumsum()
        self.buffer_offsets = ends - lengths
        """int64 [n], where each read lands in the buffer."""
        self.num_bytes = int(ends[-1]) if ends.size else 0
        """Bytes of all reads together."""

    def __len__(self) -> int:
        return self.offsets.size


def span_bytes(unit_bytes: int, page_bytes: int) -> int:
    """Returns the most bytes of whole pages that `unit_bytes` can touch: the least size of a read buffer. A unit whose
    first byte is the last of a page touches one page for it, and ceil((unit_bytes - 1) / page_bytes) more."""
    return (-(-(unit_bytes - 1) // page_bytes) + 1) * page_bytes
