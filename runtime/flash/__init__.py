"""The seam between decisions and devices: everything above it is shared by real and simulated runs.

A file of this package has a class `Flash(artifact, queue_depth)`, made for one open artifact, with the members of
`Reader`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coldpress.runtime.extents import Extents


@dataclass(frozen=True)
class Landing:
    """Units that are copied from where reads put them to their slots as soon as their pages have been checked."""

    offsets: np.ndarray
    """int64 [m], ascending: bytes from the start of the memory that is read into."""
    slots: np.ndarray
    """int32 [m]."""
    rows: np.ndarray
    """uint8 [slots, unit_bytes]: unit k goes to `rows[slots[k]]`."""


class Ticket(Protocol):
    """Reads under way. What fails is tried once more, while the caller waits."""

    def wait(self, count: int) -> None:
        """Returns when the first `count` extents are in memory.

        Raises:
            CorruptPageError: if a page's checksum differs, also when read again.
            DeviceError: if the device fails twice.
        """
        ...

    def finish(self) -> float:
        """Returns, when all are in memory, the seconds that callers waited; of a modelled device, the seconds that it
        takes. Raises as `wait`."""
        ...

    def abandon(self) -> float:
        """Returns, when nothing is written to the memory any more, whatever came of the reads, the seconds as
        `finish`."""
        ...


class Reader(Protocol):
    """What a store needs of a device."""

    moves_data: bool
    """False where `into` is left as it was, so that copying from it would be wasted."""
    direct: bool
    """Whether reads bypass the page cache; False means that memory outside the budget holds copies."""

    def submit(self, extents: Extents, into: np.ndarray, landing: Landing | None = None) -> Ticket:
        """Begins to read `extents` one after another into `into` (uint8, at least their bytes), which is theirs until
        the ticket's `finish` or `abandon` has returned, as are the slots of `landing`."""
        ...

    def close(self) -> None:
        """Closes what is open; no read may follow."""
        ...
