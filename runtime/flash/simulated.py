"""Flash that only models time: the seconds that the artifact's device profile gives for a set of reads.

It moves no data, so that a trace can be replayed without reading flash.img. With `data`, a second device supplies the
real bytes, so that a run can generate text in the modelled device's time.
"""

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import Flash, Landing, Ticket
from coldpress.schemas.device import flash_seconds


class Modelled:
    def __init__(self, flash: "Plugin", num_reads: int, seconds: float, data: Ticket | None) -> None:
        """Adds reads to `flash`, which works on them until they are finished or abandoned."""
        self._flash, self.num_reads, self._seconds, self._data = flash, num_reads, seconds, data
        flash.tickets.add(self)

    def wait(self, count: int) -> None:
        if self._data:
            self._data.wait(count)

    def finish(self) -> float:
        if self._data:
            self._data.finish()
        self._flash.tickets.discard(self)
        return self._seconds

    def abandon(self) -> float:
        if self._data:
            self._data.abandon()
        self._flash.tickets.discard(self)
        return self._seconds


class Plugin(Flash):
    def __init__(self, artifact: Artifact, queue_depth: int, data: Flash | None = None) -> None:
        """Models the device of the artifact's profile.

        Args:
            queue_depth: Reads in flight that the runtime issues; the device's own queue depth bounds them.
            data: A device that supplies the bytes; None for reads without data.
        """
        self._flash = artifact.manifest.device.flash.issuing(queue_depth)
        self._data = data
        self.moves_data = data is not None
        self.tickets: set[Modelled] = set()
        self._num_reads = self._num_bytes = self._in_flight = 0
        self._idle_s = self._busy_s = self._seconds()

    def submit(self, extents: Extents, into: np.ndarray, landing: Landing | None = None) -> Modelled:
        """Counts the seconds that these reads add to those in flight."""
        if not self.tickets:
            self._num_reads = self._num_bytes = self._in_flight = 0
            self._busy_s = self._idle_s
        before_s = self._busy_s
        self._num_reads += len(extents)
        self._in_flight = max(self._in_flight, len(extents) + sum(ticket.num_reads for ticket in self.tickets))
        self._num_bytes += extents.num_bytes
        self._busy_s = self._seconds()
        data = self._data.submit(extents, into, landing) if self._data else None
        return Modelled(self, len(extents), self._busy_s - before_s, data)

    def _seconds(self) -> float:
        return float(flash_seconds(self._flash, self._num_reads, self._num_bytes, max(1, self._in_flight)))

    def close(self) -> None:
        if self._data:
            self._data.close()
