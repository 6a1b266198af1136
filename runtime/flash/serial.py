"""The reads of direct.py with nothing beside them: whoever asks waits until all are in memory.

What a runtime does that loads and then computes; the baseline that overlapping reads with computing is measured against
(ActiveFlow 7.3, Fig. 16).
"""

import numpy as np

from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import Landing, direct


class Flash(direct.Flash):
    """flash.img of an open artifact."""

    def submit(self, extents: Extents, into: np.ndarray, landing: Landing | None = None) -> direct.Reading:
        """See `coldpress.runtime.flash.Reader`; the reads are over.

        Raises:
            CorruptPageError, DeviceError: as the ticket's `finish` would.
        """
        reading = super().submit(extents, into, landing)
        reading.finish()
        return reading
