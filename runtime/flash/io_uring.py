"""The reads of direct.py, submitted through io_uring instead of by threads that sleep in `pread`.

One thread of the native core keeps up to `queue_depth` reads in flight and checks each page while others are being
read, so that a deep queue costs neither threads nor a context switch per read. Bytes, checks and failures are the same
as in direct.py. If the kernel refuses io_uring (before Linux 5.6, by a sysctl, or by a container's filter), this is an
error, because the user has asked for io_uring by name.
"""

import os
import sys

from coldpress.runtime import _native
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.flash import direct
from coldpress.schemas.errors import ColdpressError


class Plugin(direct.Plugin):
    MAX_IN_FLIGHT = sys.maxsize
    start_reads = staticmethod(_native.start_ring_reads)

    def __init__(self, artifact: Artifact, queue_depth: int) -> None:
        """Opens the file as direct.py does; `queue_depth` is not bounded, because it costs no threads. Raises
        `ColdpressError` if the kernel refuses io_uring."""
        if error := _native.ring_error():
            raise ColdpressError(
                f"flash io_uring: the kernel refuses it ({os.strerror(error)}), expected Linux 5.6 or newer without a "
                "filter or a sysctl against it; take --flash direct"
            )
        super().__init__(artifact, queue_depth)
