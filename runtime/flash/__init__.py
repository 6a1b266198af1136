"""The seam between decisions and devices: everything above it is shared by real and simulated runs.

A file of this package has a class `Flash(artifact, queue_depth)`, made for one open artifact, with the members of
`Reader`.
"""

from typing import Protocol

import numpy as np

from runtime._extents import Extents


class Reader(Protocol):
    """What a store needs of a device."""

    moves_data: bool
    """False where `into` is left as it was, so that copying from it would be wasted."""
    direct: bool
    """Whether reads bypass the page cache; False means that memory outside the budget holds copies."""

    def read(self, extents: Extents, into: np.ndarray) -> float:
        """Reads `extents` one after another into `into` (uint8, at least their bytes) and returns seconds.

        Raises:
            CorruptPageError: if a page's checksum differs, also when read again.
        """
        ...

    def close(self) -> None:
        """Closes what is open; no read may follow."""
        ...
