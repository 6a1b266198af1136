"""Ways of reading flash.img, one per file. Real and simulated runs differ only here; they share all code that decides.

A file has one class `Plugin`, which extends `Flash` and is made for one open artifact.
"""

from abc import abstractmethod
from typing import NamedTuple, Protocol

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.extents import Extents
from coldpress.runtime.plugins import PluginBase


class Landing(NamedTuple):
    """Units to copy from the read buffer to their slots as soon as their pages have been checked; at least one."""

    offsets: np.ndarray
    """int64 [m], ascending: bytes from the start of the buffer."""
    slots: np.ndarray
    """int32 [m]."""
    rows: np.ndarray
    """uint8 [slots, unit_bytes]: unit k goes to `rows[slots[k]]`."""


class Ticket(Protocol):
    """Reads in flight. A read that fails is tried once more, while the caller waits."""

    def wait(self, count: int) -> None:
        """Returns when the first `count` extents are in memory. Raises `CorruptPageError` if a page's checksum differs,
        also when read again, and `DeviceError` if the device fails twice."""

    def finish(self) -> float:
        """Waits until all extents are in memory. Returns the seconds that callers waited, or on a modelled device the
        seconds that the device takes. Raises as `wait`."""
        ...

    def abandon(self) -> float:
        """Waits until no read writes to the memory any more, even if reads fail; returns seconds as `finish`."""
        ...


class Flash(PluginBase):
    """flash.img of an open artifact. The base class of the files of this package."""

    moves_data: bool = True
    """False if reads do not write to memory, so that copying from it would be wasted."""
    direct: bool = True
    """True if reads bypass the page cache; if not, memory outside the budget holds copies."""

    @abstractmethod
    def __init__(self, artifact: Artifact, queue_depth: int) -> None:
        """Opens the device, for `queue_depth` reads in flight at once. Raises `ColdpressError` if this machine does not
        support this way of reading."""

    @abstractmethod
    def submit(self, extents: Extents, into: np.ndarray, landing: Landing | None = None) -> Ticket:
        """Begins to read `extents`, one after another, into `into` (uint8, at least their bytes). `into` and the slots
        of `landing` belong to the reads until the ticket's `finish` or `abandon` has returned."""

    @abstractmethod
    def close(self) -> None:
        """Closes the device; no read may follow."""
