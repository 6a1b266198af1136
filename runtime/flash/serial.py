"""The reads of direct.py without overlap: the caller waits until all of them are in memory.

This is the baseline without overlap: a runtime that first loads and then computes (ActiveFlow 7.3, Fig. 16).
"""

import numpy as np

from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import Landing, direct


class Plugin(direct.Plugin):
    def submit(self, extents: Extents, into: np.ndarray, landing: Landing | None = None) -> direct.DirectReads:
        """Reads and waits; see `coldpress.runtime.flash.Flash`. Raises `CorruptPageError` or `DeviceError` as the
        ticket's `finish` would."""
        reading = super().submit(extents, into, landing)
        reading.finish()
        return reading
