"""Flash that only counts time: the seconds that the artifact's device profile gives for a set of reads.

Same interface as direct.py and no data, so that a trace can be replayed without touching flash.img; or, with `data`,
the real bytes at modelled speed, so that text can be generated as if on that device.
"""

from dataclasses import dataclass

import numpy as np

from runtime._extents import Extents
from runtime.artifact.reader import Artifact
from runtime.flash import Reader, Ticket
from schemas.device import flash_seconds


@dataclass(frozen=True)
class Modelled:
    """Reads that take the seconds of a model; see `runtime.flash.Ticket`."""

    seconds: float
    data: Ticket | None

    def wait(self, count: int) -> None:
        """See `runtime.flash.Ticket`."""
        if self.data:
            self.data.wait(count)

    def finish(self) -> float:
        """See `runtime.flash.Ticket`."""
        if self.data:
            self.data.finish()
        return self.seconds

    def abandon(self) -> None:
        """See `runtime.flash.Ticket`."""
        if self.data:
            self.data.abandon()


class Flash:
    """The flash of an artifact's device profile."""

    direct = True

    def __init__(self, artifact: Artifact, queue_depth: int, data: Reader | None = None) -> None:
        """A modelled device.

        Args:
            artifact: Its manifest holds the device profile.
            queue_depth: Reads in flight that the runtime issues; the device's own depth bounds them.
            data: Where bytes come from, if they are wanted.
        """
        self._flash = artifact.manifest.device.flash.issuing(queue_depth)
        self._data = data
        self.moves_data = data is not None

    def submit(self, extents: Extents, into: np.ndarray) -> "Modelled":
        """See `runtime.flash.Reader`; modelled seconds."""
        seconds = float(flash_seconds(self._flash, len(extents), extents.num_bytes))
        return Modelled(seconds, self._data.submit(extents, into) if self._data else None)

    def close(self) -> None:
        """Closes where bytes come from."""
        if self._data:
            self._data.close()
