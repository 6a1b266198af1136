"""The modelled clock: the seconds that decoded tokens take on a device, request by request.

`Clock` is an observer of the store; simulations attach it, and so do runs that ask for modelled seconds. Flash time
follows the law of schemas/device.py, computing that of runtime/store/computing.py.
"""

import numpy as np

from coldpress.runtime.store import planner
from coldpress.runtime.store.computing import NOTHING, Arrival, Work, deciding_seconds, request_work
from coldpress.runtime.store.facts import Observer, PreloadFacts, RequestFacts
from coldpress.runtime.store.resident import chosen_from, seconds_before
from coldpress.schemas.device import Flash, flash_seconds
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest


class FlashQueue:
    def __init__(self) -> None:
        self._left_s = 0.0

    def begin(self, flash_s: float) -> None:
        self._left_s += flash_s

    def compute(self, seconds: float) -> None:
        """Computes while no request waits; queued reads go on meanwhile."""
        self._left_s = max(0.0, self._left_s - seconds)

    def fetch_s(self, reads: Arrival, work: Work, *, needs_queue: bool) -> float:
        """Returns the seconds of a request, see `computing.fetch_seconds`. Its reads queue behind earlier ones. It
        waits for the earlier ones only if they bring some of its units (`needs_queue`), or if it reads, too."""
        self.compute(work.deciding_s)
        seconds = work.with_reads(reads, self._left_s if needs_queue or reads.num_portions else 0.0)
        self._left_s = max(0.0, self._left_s + reads.flash_s - (seconds - work.deciding_s))
        return seconds


class Clock(Observer):
    def __init__(self, manifest: Manifest, plan: Plan) -> None:
        """Begins at zero; `plan` says how many reads are in flight and which weights are used between requests."""
        self._device = manifest.device
        self._queue = FlashQueue()
        self.follow(manifest, plan)
        self.flash_s = 0.0
        """Seconds of the reads alone, summed over requests."""
        self.work_s = 0.0
        """Seconds of the requests without their reads."""
        self.fetch_s = 0.0
        """Seconds of the requests."""

    def follow(self, manifest: Manifest, plan: Plan) -> None:
        self._flash = manifest.device.flash.issuing(plan.queue_depth)
        self._weights = chosen_from(manifest)
        self._seconds_before = seconds_before(manifest, plan) if plan.preload_buffer_bytes else {}

    def start(self) -> None:
        """Counts from zero again; reads that are still queued stay."""
        self.flash_s = self.work_s = self.fetch_s = 0.0

    def request(self, facts: RequestFacts) -> None:
        reads = arrival(self._flash, facts.plan, facts.buffer_bytes, facts.room_bytes)
        size, weights = facts.unit_bytes, self._weights[facts.key]
        read_bytes = (facts.num_preloaded + facts.num_read) * size
        sizes = facts.num_resident * size, read_bytes, facts.num_stored * size
        work = request_work(self._device, weights, *sizes, reads.num_portions, facts.num_preloaded * size)
        self._queue.compute(self._seconds_before.get(facts.key, 0.0))
        self.flash_s += reads.flash_s
        self.work_s += work.seconds
        self.fetch_s += self._queue.fetch_s(reads, work, needs_queue=facts.num_preloaded > 0)

    def preloaded(self, facts: PreloadFacts) -> None:
        """Counts the time of a guess even if nothing is read for it."""
        guess_s = deciding_seconds(self._device, facts.batch is not None)
        self._queue.compute(guess_s)
        self.work_s += guess_s
        self.fetch_s += guess_s
        if facts.batch is not None:
            reads = facts.batch.extents
            flash_s = float(flash_seconds(self._flash, len(reads), reads.num_bytes))
            self.flash_s += flash_s
            self._queue.begin(flash_s)


def arrival(flash: Flash, plan: planner.ReadPlan, buffer_bytes: int, room: int) -> Arrival:
    """Returns how a plan's reads arrive by a device's law, if a batch takes at most `room` bytes of the buffer.

    If `room` is half of the buffer, the device never idles, and has the reads of two batches in flight; else it works
    on one buffer at a time.
    """
    reads = plan.extents
    if not len(reads):
        return NOTHING
    if reads.num_bytes <= room:
        return Arrival(
            float(flash_seconds(flash, len(reads), reads.num_bytes)), planner.num_portions(reads.num_bytes), True
        )
    stops = np.array(planner.batch_stops(reads.lengths, room))
    counts, num_bytes = np.diff(stops, prepend=0), np.add.reduceat(reads.lengths, np.concatenate([[0], stops[:-1]]))
    portions = int(planner.num_portions(num_bytes).sum())
    if room < buffer_bytes:
        in_flight = int((counts[:-1] + counts[1:]).max())
        return Arrival(float(flash_seconds(flash, len(reads), reads.num_bytes, in_flight)), portions, True)
    return Arrival(sum(flash_seconds(flash, counts, num_bytes).tolist()), portions, False)
