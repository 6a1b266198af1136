"""Flash that only counts time: the seconds that the artifact's device profile gives for a set of reads.

Same interface as direct.py and no data, so that a trace can be replayed without touching flash.img; or, with `data`,
the real bytes at modelled speed, so that text can be generated as if on that device.
"""

import numpy as np

from runtime._extents import Extents
from runtime.artifact.reader import Artifact
from runtime.flash import Reader
from schemas.device import flash_seconds


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

    def read(self, extents: Extents, into: np.ndarray) -> float:
        """See `runtime.flash.Reader`; modelled seconds."""
        if self._data:
            self._data.read(extents, into)
        return float(flash_seconds(self._flash, len(extents), extents.num_bytes))

    def close(self) -> None:
        """Closes where bytes come from."""
        if self._data:
            self._data.close()
